"""Reports compilations in the Trainer's progress bar and in Lightning's log."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from lit_ort._compat.lightning import beside_bars, describe_bar, package_of
from lit_ort.backend.compile_timer import LogListener

_STAGES = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}


class ProgressListener:
    """Shows compilations in a Trainer's progress bar and logs lines about them, on rank zero.

    Args:
        trainer: of either of Lightning's packages.
    """

    def __init__(self, trainer: Any) -> None:
        # Compiled code can outlive the Trainer, and has the log of compilations with this listener.
        self._reference = weakref.ref(trainer)
        # Lightning's loggers are named after its packages.
        self._log = LogListener(package_of(trainer))
        self._restore: Callable[[], None] | None = None

    def compiling(self, step: str, seconds: float) -> None:
        """Shows the step and its seconds in the bar; without one, logs one line."""
        trainer = self._reference()
        if trainer is None or not trainer.is_global_zero:
            return
        bar, stage = trainer.progress_bar_callback, _STAGES.get(step, "train")
        restore = describe_bar(bar, stage, f"compiling {step}, {seconds:.0f} s")
        if self._restore is None:
            self._restore = restore
        if restore is None:
            self._log.compiling(step, seconds)

    def finished(self, step: str, seconds: float) -> None:
        """Restores the bar's description and logs the seconds, if the bar was used."""
        self._log.finished(step, seconds)
        if self._restore is not None:
            self._restore()
            self._restore = None
            self.note(f"compiled {step} in {seconds:.1f} s")

    def note(self, line: str) -> None:
        trainer = self._reference()
        if trainer is not None and trainer.is_global_zero:
            with above_bars(trainer):
                self._log.note(line)


@contextmanager
def above_bars(trainer: Any) -> Iterator[None]:
    """Keeps Lightning's log lines apart from the Trainer's bars.

    tqdm's bars are cleared while the block runs. Rich replaces `sys.stderr` by a stream that writes above its bars, but
    Lightning's logger keeps the original stream; it uses the replacement while the block runs.
    """
    handlers = [handler for handler in logging.getLogger(package_of(trainer)).handlers if _is_for_stderr(handler)]
    for handler in handlers:
        handler.setStream(sys.stderr)
    try:
        with beside_bars(trainer.progress_bar_callback):
            yield
    finally:
        for handler in handlers:
            handler.setStream(sys.__stderr__)


def _is_for_stderr(handler: logging.Handler) -> TypeGuard[logging.StreamHandler[Any]]:
    return isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stderr__
