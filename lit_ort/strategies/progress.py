"""What a person sees while a step compiles: a text in the progress bar, and a line in Lightning's log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_ort._compat.lightning import beside_bars, describe_bar
from lit_ort.backend.watch import LogListener

_STAGES = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}


class ProgressListener:
    """Shows compilations in a Trainer's progress bar, and logs them.

    Args:
        trainer: of either of Lightning's packages.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        package = type(trainer).__module__.partition(".trainer")[0]
        self._log = LogListener(package)
        self._restore: Callable[[], None] | None = None

    def started(self, step: str) -> None:
        """Says what is compiled: in the bar, or in the log where there is none."""
        if not self._trainer.is_global_zero:
            return
        self._restore = describe_bar(self._trainer.progress_bar_callback, _STAGES[step], f"compiling {step}")
        if self._restore is None:
            self._log.started(step)

    def finished(self, step: str, seconds: float) -> None:
        """Says how long it took."""
        if self._restore is not None:
            self._restore()
            self._restore = None
        if self._trainer.is_global_zero:
            with beside_bars(self._trainer.progress_bar_callback):
                self._log.finished(step, seconds)
