"""Measures where the time of steps goes: ONNX Runtime's own kernels, torch nodes in its sessions, or eager PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any


@dataclasses.dataclass
class Clock:
    """Seconds since the first run, by part.

    Attributes:
        sessions: seconds in runs of sessions, including their torch nodes.
        torch_nodes: seconds in the torch nodes of sessions.
        eager: seconds in the forwards of graphs that run in eager PyTorch.
    """

    sessions: float = 0.0
    torch_nodes: float = 0.0
    eager: float = 0.0

    def set(self, other: Clock) -> None:
        """Takes the seconds of another clock."""
        self.sessions, self.torch_nodes, self.eager = other.sessions, other.torch_nodes, other.eager

    @contextmanager
    def running(self, part: str) -> Iterator[None]:
        """Adds the time of a block to a part."""
        start = perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + perf_counter() - start)

    def node(self, function: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """Wraps a torch node's function to add its time."""

        def timed(*args: Any) -> Sequence[Any]:
            start = perf_counter()
            try:
                return function(*args)
            finally:
                self.torch_nodes += perf_counter() - start

        return timed

    @property
    def shares(self) -> dict[str, float] | None:
        """The share of each part in the total, or None before the first run."""
        total = self.sessions + self.eager
        if not total:
            return None
        return {
            "ONNX Runtime": max(0.0, self.sessions - self.torch_nodes) / total,
            "torch operators in its sessions": min(self.torch_nodes, self.sessions) / total,
            "eager PyTorch": self.eager / total,
        }
