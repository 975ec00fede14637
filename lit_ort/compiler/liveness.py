"""When the values of a graph come to life and die, and how many bytes they take."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable

import onnx_ir as ir

from lit_ort.compiler.kernel_nodes import kernel_of
from lit_ort.compiler.kernels.embedding import ONTO
from lit_ort.compiler.kernels.ordering import AFTER

# Their result lies in the memory of their first input.
ALIASES = frozenset({"Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten"})


def home(value: ir.Value) -> ir.Value:
    """The value whose memory holds this one."""
    node = value.producer()
    while node is not None and _shares_memory(node) and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def size_bytes(value: ir.Value) -> int:
    """Bytes of a value of known shape; 0 of another."""
    if value.dtype is None or value.shape is None or not all(isinstance(size, int) for size in value.shape):
        return 0
    return math.ceil(math.prod(int(size) for size in value.shape) * value.dtype.itemsize)  # type: ignore[arg-type]


class Liveness:
    """Follows a graph node by node: what is held, and what one more node would add.

    Args:
        graph: its inputs and constants count as held by others.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.held_bytes = 0
        self._readers: collections.Counter[ir.Value] = collections.Counter()
        for node in graph:
            self._readers.update(_homes(node.inputs))
        # An output is read by whoever asked for it.
        self._readers.update(_homes(graph.outputs))

    def grown_by(self, node: ir.Node) -> int:
        """Bytes that are held more once a node has run and what it read last is free."""
        return self.taken_by(node) - sum(size_bytes(value) for value in self._read_last(node))

    def taken_by(self, node: ir.Node) -> int:
        """Bytes of a node's own results."""
        return sum(size_bytes(value) for value in node.outputs if home(value) is value)

    def run(self, node: ir.Node) -> None:
        """Moves on past a node."""
        self.held_bytes += self.grown_by(node)
        self._readers.subtract(_homes(node.inputs))

    def _read_last(self, node: ir.Node) -> Iterable[ir.Value]:
        return (value for value in _homes(node.inputs) if self._readers[value] == 1 and value.producer() is not None)


def peak_bytes(graph: ir.Graph) -> int:
    """The most that a graph holds at a time, in the order of its nodes, beside its inputs and constants."""
    liveness, peak = Liveness(graph), 0
    for node in graph:
        peak = max(peak, liveness.held_bytes + liveness.taken_by(node))
        liveness.run(node)
    return peak


def _shares_memory(node: ir.Node) -> bool:
    return (node.op_type in ALIASES and not node.domain) or kernel_of(node) in (ONTO, AFTER)


def _homes(values: Iterable[ir.Value | None]) -> set[ir.Value]:
    return {home(value) for value in values if value is not None}
