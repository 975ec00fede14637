"""Signals that wait until a run ends.

Python calls a signal's handler where a function begins, which can be a callback of ONNX Runtime's. What the handler
raises there, such as KeyboardInterrupt, is lost before any `except` of the callback, and the callback returns no value,
which ends the process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

try:
    # The public functions make members of enums, which takes longer than the calls.
    from _signal import getsignal  # pyright: ignore[reportMissingImports]
    from _signal import signal as set_handler  # pyright: ignore[reportMissingImports]
except ImportError:  # not CPython
    from signal import getsignal
    from signal import signal as set_handler

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGALRM", "SIGBREAK")
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))

Handler = Callable[[int, FrameType | None], Any]


class HeldSignals:
    """Calls the handlers of signals that arrive in the block when it ends; on the main thread, which alone has any."""

    __slots__ = ("_arrived", "_handlers")

    def __init__(self) -> None:
        self._handlers: list[tuple[int, Handler]] = []
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _SIGNALS:
                handler = getsignal(number)
                if callable(handler):
                    self._handlers.append((number, handler))
                    set_handler(number, self._note)
        except BaseException:  # of a handler that is not replaced yet
            self._restore()
            raise

    def __exit__(self, *error: Any) -> None:
        handlers = dict(self._handlers)
        self._restore()
        self._deliver(handlers)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))

    # A handler can raise in these two; the others follow nevertheless.

    def _restore(self) -> None:
        if self._handlers:
            try:
                set_handler(*self._handlers.pop())
            finally:
                self._restore()

    def _deliver(self, handlers: Mapping[int, Handler]) -> None:
        if self._arrived:
            number, frame = self._arrived.pop(0)
            try:
                handlers[number](number, frame)
            finally:
                self._deliver(handlers)
