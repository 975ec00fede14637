"""What a person sees while a step compiles: a text in the progress bar, and lines in Lightning's log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_ort._compat.lightning import beside_bars, describe_bar
from lit_ort.backend.watch import LogListener

_STAGES = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}


class ProgressListener:
    """Shows compilations in a Trainer's progress bar, and logs them, on rank zero.

    Args:
        trainer: of either of Lightning's packages.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        package = type(trainer).__module__.partition(".trainer")[0]
        self._log = LogListener(package)
        self._restore: Callable[[], None] | None = None

    def compiling(self, step: str, seconds: float) -> None:
        """Shows the step and its seconds in the bar; without one, logs one line."""
        if not self._trainer.is_global_zero:
            return
        bar, stage = self._trainer.progress_bar_callback, _STAGES.get(step, "train")
        restore = describe_bar(bar, stage, f"compiling {step}, {seconds:.0f} s")
        if self._restore is None:
            self._restore = restore
        if restore is None:
            self._log.compiling(step, seconds)

    def finished(self, step: str, seconds: float) -> None:
        """Puts the bar's own text back and logs how long it took."""
        self._log.finished(step, seconds)
        if self._restore is not None:
            self._restore()
            self._restore = None
            self.note(f"compiled {step} in {seconds:.1f} s")

    def note(self, line: str) -> None:
        if self._trainer.is_global_zero:
            with beside_bars(self._trainer.progress_bar_callback):
                self._log.note(line)
