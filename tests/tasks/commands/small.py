"""train.py on a small text in plain PyTorch."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

TRAIN = Path(__file__).parents[3] / "train.py"
SMALL = (
    *("strategy=eager", "data=wikitext2", "data.batch_size=4", "data.eval_batch_size=2", "data.bptt=6"),
    *("task.width=8", "task.feed_forward=8", "task.layers=1", "task.dropout=0.0", "trainer.log_every_n_steps=2"),
)
QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none")


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, text: Path, *overrides: str) -> dict[str, Any]:
    """Runs train.py in this process. Returns the content of results.json."""
    start(monkeypatch, f"data.dir={text}", f"hydra.run.dir={folder}", *overrides)
    return json.loads((folder / "results.json").read_text())


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Runs train.py in this process with the small model."""
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, *QUIET, *arguments])
    runpy.run_path(str(TRAIN), run_name="__main__")
