"""The time that compiling takes, reported while it runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

# Compilations shorter than this are not reported; longer ones are reported again after each such interval.
SECONDS = 1.0


class Listener(Protocol):
    """Receives reports about the compilation of steps."""

    def compiling(self, step: str, seconds: float) -> None:
        """A step has been compiling for some seconds. Called about once a second, in a separate thread."""
        ...

    def finished(self, step: str, seconds: float) -> None:
        """A step that was reported as compiling has run; its compilation took so many seconds."""
        ...

    def note(self, line: str) -> None:
        """One line about a compilation."""
        ...


class LogListener:
    """Writes to a logger: one line when a compilation turns out to be long.

    Args:
        logger: the logger's name.
    """

    def __init__(self, logger: str = "lit_ort") -> None:
        self._logger = logging.getLogger(logger)
        self._step: str | None = None

    def compiling(self, step: str, seconds: float) -> None:
        if self._step is None:
            self._step = step
            self.note(f"compiling {step} ...")

    def finished(self, step: str, seconds: float) -> None:
        self._step = None

    def note(self, line: str) -> None:
        self._logger.info("lit_ort: %s", line)


class CompileWatch:
    """Adds up the time that one step at a time spends in Dynamo and in a backend.

    Attributes:
        listener: receives a report as soon as that is longer than `SECONDS`, and then once a second.
        total: the seconds of all compilations.
    """

    def __init__(self) -> None:
        self.listener: Listener = LogListener()
        self._step: str | None = None
        self._depth = 0
        self._begin = self._spent = 0.0
        self._ticker: _Ticker | None = None
        self._is_reported = False
        self.total = 0.0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Adds up what is compiled while a step runs."""
        self._step, self._spent = name, 0.0
        try:
            yield
        finally:
            self._step = None
            if self._is_reported:
                self._finish(name)

    @contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Counts what Dynamo or a backend does; outside of a step, as the compilation of `name`."""
        is_alone = self._step is None
        if is_alone:
            self._step, self._spent = name, 0.0
        self._enter()
        try:
            yield
        finally:
            self._leave()
            if is_alone:
                self._step = None
                if self._is_reported:
                    self._finish(name)

    def _finish(self, name: str) -> None:
        self._is_reported = False
        self.listener.finished(name, self._spent)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._begin = perf_counter()
        self._ticker = _Ticker(max(0.0, SECONDS - self._spent), self._report)
        self._ticker.start()

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        seconds = perf_counter() - self._begin
        self._spent += seconds
        self.total += seconds
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None

    def _report(self) -> None:
        self._is_reported = True
        self.listener.compiling(self._step or "a function", self._spent + perf_counter() - self._begin)


class _Ticker:
    """Calls a function after a delay and then once in `SECONDS`, in a separate thread, until it is stopped."""

    def __init__(self, delay: float, function: Callable[[], None]) -> None:
        self._delay = delay
        self._function = function
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a call in progress is completed first."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        delay = self._delay
        while not self._stopped.wait(delay):
            self._function()
            delay = SECONDS
