"""Signals during runs: their handlers run between runs, whatever they raise."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_ort._compat.held_signals import HeldSignals
from tests.runtime.test_engines import Graph, state


@pytest.fixture(name="interrupt")
def _interrupt() -> Iterator[Any]:
    """Python's handler of SIGINT: there is none in a process that a shell started in the background."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, previous)


def test_an_interrupt_between_nodes_waits_for_the_end_of_the_run(interrupt: Any) -> None:
    """Without a Python function in progress, its error would be raised where the second node's callback begins."""
    threads: list[threading.Timer] = []
    finished: list[bool] = []

    def interrupting(x: Tensor) -> list[Tensor]:
        threads.append(threading.Timer(0.01, signal.raise_signal, [signal.SIGINT]))
        threads[-1].start()
        return [x * 2]

    def finishing(x: Tensor) -> list[Tensor]:
        # On busy cores the matmul can end before the signal.
        threads[-1].join()
        finished.append(True)
        return [x * 1]

    graph = Graph(x=torch.ones(1600, 1600))
    (doubled,) = graph.by_torch(interrupting, ["x"], torch.float32)
    product = graph.builder.node("MatMul", [doubled, "x"], "product")
    (result,) = graph.by_torch(finishing, [product], torch.float32)
    session = graph.session({result: torch.float32})
    for count in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            session.run(graph.tensors, state())
        assert finished == [True] * count
    assert signal.getsignal(signal.SIGINT) == interrupt


@pytest.fixture(name="received")
def _received() -> Iterator[list[int]]:
    """Handlers of two signals that note them, of which the first one raises."""
    received: list[int] = []

    def raising(number: int, frame: Any) -> None:
        received.append(number)
        raise InterruptedError("stopped")

    previous = signal.signal(signal.SIGUSR1, raising), signal.signal(signal.SIGUSR2, lambda n, _: received.append(n))
    yield received
    signal.signal(signal.SIGUSR1, previous[0])
    signal.signal(signal.SIGUSR2, previous[1])


def test_every_handler_is_called_and_restored(received: list[int]) -> None:
    handlers = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
    inside: list[int] = []

    def run() -> None:
        with HeldSignals(), HeldSignals():
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR2)
            inside.extend(received)

    with pytest.raises(InterruptedError, match="stopped"):
        run()
    assert not inside
    assert received == [signal.SIGUSR1, signal.SIGUSR2]
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)) == handlers


def test_other_threads_have_no_handlers() -> None:
    handler = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def run() -> None:
        with HeldSignals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [handler]
