"""Writes that autograd doesn't notice: batch normalization updates its statistics without raising their version.

A part of the same step that ran in eager can have saved these statistics for its backward, which would refuse a newer
version.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from lit_ort._compat.torch import memory_of
from lit_ort._compat.torch_fx import arguments_of, example_of
from lit_ort._compat.torch_ops import written_arguments

_STATISTICS = slice(3, 5)
_BATCH_NORMS = frozenset({torch.ops.aten.batch_norm.default, torch.ops.aten.native_batch_norm.default})
# It has the same arguments, and writes with operators that autograd notices.
_INSTANCE_NORM = torch.ops.aten.instance_norm.default


def unnoticed_writes(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> frozenset[int]:
    """The positions of the inputs that a captured graph changes only in such a way."""
    unnoticed, noticed = set[int](), set[int]()
    for node in graph.nodes:
        if node.target in _BATCH_NORMS:
            unnoticed.update(_memories(arguments_of(node)[_STATISTICS]))
        elif node.target is _INSTANCE_NORM:
            noticed.update(_memories(arguments_of(node)[_STATISTICS]))
        noticed.update(_memories(written_arguments(node)))
    return frozenset(k for k, value in enumerate(inputs) if memory_of(value) in unnoticed - noticed)


def _memories(nodes: Sequence[fx.Node | None]) -> set[int]:
    examples = (example_of(node) for node in nodes if node is not None)
    return {memory_of(value) for value in examples if isinstance(value, torch.Tensor)}
