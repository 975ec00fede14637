"""The results of the runs in these tests, and consoles without a terminal."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

STEPS: dict[str, Any] = {
    **dict(step_ms_median=100.0, items_per_s=7000.0, first_step_s=0.5, peak_mib=700.0, peak_above_start_mib=280.0),
    "item": "tokens",
}
METRICS = {"train/loss": 6.5, "val/ppl": 600.0, "test/ppl": 500.0}


def console() -> Console:
    return Console(file=StringIO(), width=110)


def output_of(terminal: Console) -> str:
    assert isinstance(terminal.file, StringIO)
    return terminal.file.getvalue()
