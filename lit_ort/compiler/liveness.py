"""When the values of a graph come to life and die, and how many bytes they take."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable

import onnx_ir as ir

from lit_ort.compiler.kernel_nodes import kernel_of
from lit_ort.compiler.kernels import linear_cross_entropy
from lit_ort.compiler.kernels.bf16 import BF16
from lit_ort.compiler.kernels.embedding import ONTO
from lit_ort.compiler.kernels.ordering import AFTER
from lit_ort.compiler.sizes import sizes_of

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
    """Bytes of a value of known shape, or of an example where sizes change; 0 of another."""
    sizes = sizes_of(value)
    return 0 if value.dtype is None or sizes is None else math.ceil(math.prod(sizes) * value.dtype.itemsize)


class Liveness:
    """Follows a graph node by node: what is held, and what one more node would add.

    Args:
        graph: its inputs and constants count as held by others.
        counts: the values whose bytes count; all by default.
    """

    def __init__(self, graph: ir.Graph, counts: Callable[[ir.Value], bool] = lambda _: True) -> None:
        self.held_bytes = 0
        self._counts = counts
        self._readers: collections.Counter[ir.Value] = collections.Counter()
        for node in graph:
            self._readers.update(_homes(node.inputs))
        # An output is read by whoever asked for it.
        self._readers.update(_homes(graph.outputs))

    def grown_by(self, node: ir.Node) -> int:
        """Bytes that are held more once a node has run and what it read last is free."""
        return self.taken_by(node) - sum(size_bytes(value) for value in self._read_last(node) if self._counts(value))

    def taken_by(self, node: ir.Node) -> int:
        """Bytes of a node's own results."""
        return sum(size_bytes(value) for value in node.outputs if home(value) is value and self._counts(value))

    def run(self, node: ir.Node) -> None:
        """Moves on past a node."""
        self.held_bytes += self.grown_by(node)
        self._readers.subtract(_homes(node.inputs))

    def _read_last(self, node: ir.Node) -> Iterable[ir.Value]:
        return (value for value in _homes(node.inputs) if self._readers[value] == 1 and value.producer() is not None)


def peak_bytes(graph: ir.Graph) -> int:
    """The memory that a run of a graph takes, in the order of its nodes, beside its inputs and constants.

    Results of torch kernels lie in the pool and those of other nodes in ONNX Runtime's arena; neither lends to the
    other, so the peaks of both add up.
    """
    pool = _peak(graph, is_pooled, workspace_bytes)
    return pool + _peak(graph, lambda value: not is_pooled(value), lambda _: 0)


def is_pooled(value: ir.Value) -> bool:
    """Whether a torch kernel brings the memory of a value."""
    node = home(value).producer()
    return node is not None and kernel_of(node) is not None


def workspace_bytes(node: ir.Node) -> int:
    """Memory that a kernel takes beside its results, where that is much: the logits of a chunk."""
    kernel = kernel_of(node) or ""
    if not kernel.startswith(linear_cross_entropy.NAME):
        return 0
    hidden, weight = (node.inputs[k] for k in (linear_cross_entropy.HIDDEN, linear_cross_entropy.WEIGHT))
    itemsize = 2 if kernel.endswith(BF16) else 4
    shapes = [sizes_of(value) for value in (hidden, weight)]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return 0
    rows, classes = (int(shape[0]) for shape in known)
    return linear_cross_entropy.chunk_rows(rows, classes, itemsize) * classes * itemsize


def _peak(graph: ir.Graph, counts: Callable[[ir.Value], bool], beside: Callable[[ir.Node], int]) -> int:
    liveness, peak = Liveness(graph, counts), 0
    for node in graph:
        peak = max(peak, liveness.held_bytes + liveness.taken_by(node) + beside(node))
        liveness.run(node)
    return peak


def _shares_memory(node: ir.Node) -> bool:
    return (node.op_type in ALIASES and not node.domain) or kernel_of(node) in (ONTO, AFTER)


def _homes(values: Iterable[ir.Value | None]) -> set[ir.Value]:
    return {home(value) for value in values if value is not None}
