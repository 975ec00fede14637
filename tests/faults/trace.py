"""A trace of the steps of a run, in a file outside of the run's folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class StepTrace(Callback):
    """Appends the number and the exact loss of each optimizer step to a file, at once, in case the process dies."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        line = json.dumps({"step": trainer.global_step, "loss": float(outputs["loss"]).hex()}) + "\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


@dataclass(frozen=True)
class Step:
    """A step that was run.

    Args:
        step: the global step after it.
        loss: its loss in hexadecimal, which is exact.
    """

    step: int
    loss: str


def read_trace(path: Path) -> list[Step]:
    """The steps in the order in which they ran, including those of resumed runs."""
    return [Step(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
