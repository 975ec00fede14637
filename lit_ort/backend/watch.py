"""Tells what is being compiled, once that takes longer than a second, and how long it took."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from lit_ort._compat.torch_dynamo import traces_told

SECONDS = 1.0


class Listener(Protocol):
    """What hears of a long compilation. `started` is called in a thread of its own."""

    def started(self, step: str) -> None: ...

    def finished(self, step: str, seconds: float) -> None: ...


class LogListener:
    """Writes to a logger.

    Args:
        logger: by its name.
    """

    def __init__(self, logger: str = "lit_ort") -> None:
        self._logger = logging.getLogger(logger)

    def started(self, step: str) -> None:
        self._logger.info("lit_ort: compiling %s ...", step)

    def finished(self, step: str, seconds: float) -> None:
        self._logger.info("lit_ort: compiled %s in %.1f s", step, seconds)


class CompileWatch:
    """Adds up the time that one step at a time spends in Dynamo and in a backend.

    Attributes:
        listener: hears of a step as soon as that is longer than `SECONDS`.
    """

    def __init__(self) -> None:
        self.listener: Listener = LogListener()
        self._step = "a function"
        self._depth = 0
        self._begin = self._spent = 0.0
        self._timer: threading.Timer | None = None
        self._told = threading.Event()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Watches Dynamo while a step runs."""
        self._step, self._spent = name, 0.0
        try:
            with traces_told(self._enter, self._leave):
                yield
        finally:
            if self._told.is_set():
                self._told.clear()
                self.listener.finished(name, self._spent)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Counts what a backend does."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._begin = time.perf_counter()
        if not self._told.is_set():
            self._timer = threading.Timer(max(0.0, SECONDS - self._spent), self._tell, (self._step,))
            self._timer.daemon = True
            self._timer.start()

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._spent += time.perf_counter() - self._begin
        if self._timer is not None:
            self._timer.cancel()
            # One that has just fired has told by then.
            self._timer.join()
            self._timer = None

    def _tell(self, step: str) -> None:
        self._told.set()
        self.listener.started(step)
