"""Assignments to the elements that a mask chooses.

In:  `aten.index_put(x, [mask], values)`, as `x[mask] = values`, where the values need a gradient
Out: `aten.where(mask, values, x)`, or `x + where(mask, values, 0)` with `accumulate`, each row of `values` at its place
Saves the graph: the gradient of the values is a selection by the mask, whose size is not known before it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of
from lit_ort.fusions.graph import FusionGraph
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "masked_assignments"
_IN_PLACE = aten.index_put_.default
_TARGETS = (aten.index_put.default, _IN_PLACE)
_MISMATCH = "shape mismatch: the values of a masked assignment are not as many as the mask chooses"


def write_masked_assignments(graph: FusionGraph) -> PassReport:
    """Rewrites a captured graph in place."""
    fired, declined = 0, []
    for node in list(graph.graph.nodes):
        if node.target not in _TARGETS:
            continue
        assignment = _Assignment.of(node)
        if assignment is None or not graph.needs_gradient(assignment.values):
            continue
        if not assignment.is_regular:
            declined.append(f"{node.name}: its values are of another type, or have dimensions of their own")
            continue
        _replace(graph, node, assignment)
        fired += 1
    return PassReport(NAME, fired, tuple(declined))


@dataclasses.dataclass(frozen=True)
class _Assignment:
    """One assignment.

    Args:
        x: what is changed.
        mask: of truth values.
        values: broadcast to the shape of `x[..., mask, ...]`.
        before, after: dimensions of `x` ahead of the mask's and behind them.
        adds: whether values are added.
    """

    x: fx.Node
    mask: fx.Node
    values: fx.Node
    before: int
    after: int
    adds: bool

    @classmethod
    def of(cls, node: fx.Node) -> _Assignment | None:
        """None where the index is anything but one mask."""
        x, indices, values, *rest = arguments_of(node)
        chosen = [index for index in indices if index is not None]
        if len(chosen) != 1 or _value(chosen[0]).dtype != torch.bool:
            return None
        before = list(indices).index(chosen[0])
        after = _value(x).dim() - before - _value(chosen[0]).dim()
        return cls(x, chosen[0], values, before, after, bool(rest and rest[0]))

    @property
    def rows(self) -> int | None:
        """The dimension of the values, from the first, that runs over chosen elements; None where none does."""
        row = _value(self.values).dim() - 1 - self.after
        return row if row >= 0 else None

    @property
    def is_regular(self) -> bool:
        values = _value(self.values)
        return values.dim() <= self.before + 1 + self.after and values.dtype == _value(self.x).dtype


def _value(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]


def _replace(graph: FusionGraph, node: fx.Node, assignment: _Assignment) -> None:
    with graph.graph.inserting_before(node):
        values, mask, rows = assignment.values, assignment.mask, assignment.rows
        shape = list(_value(mask).shape)
        if rows is not None:
            values = _placed(graph, assignment, rows, shape)
        mask = graph.call(aten.reshape.default, mask, [*_sizes(graph, mask, shape), *[1] * assignment.after])
        if assignment.adds:
            added = graph.call(aten.where.ScalarOther, mask, values, 0.0)
            chosen = graph.call(aten.add.Tensor, assignment.x, added)
        else:
            chosen = graph.call(aten.where.self, mask, values, assignment.x)
        if node.target is _IN_PLACE:
            chosen = graph.call(aten.copy_.default, assignment.x, chosen)
    node.replace_all_uses_with(chosen)
    graph.graph.erase_node(node)


def _placed(graph: FusionGraph, assignment: _Assignment, rows: int, shape: Sequence[Any]) -> fx.Node:
    """The values with the mask's dimensions in place of the one that runs over chosen elements."""
    values, mask = assignment.values, assignment.mask
    sizes = list(_value(values).shape)
    if sizes[rows] == 1:
        ones = [*_sizes(graph, values, sizes[:rows]), *[1] * len(shape), *_sizes(graph, values, sizes, rows + 1)]
        return graph.call(aten.reshape.default, values, ones)
    flat = graph.call(aten.reshape.default, mask, [-1])
    count = graph.call(aten.sum.default, flat)
    matches = graph.call(aten.eq.Scalar, count, _sizes(graph, values, sizes)[rows])
    graph.call(aten._assert_async.msg, matches, _MISMATCH)
    # Of an element that is not chosen, any row will do, and there may be none.
    padded = graph.call(aten.constant_pad_nd.default, values, [0, 0] * (len(sizes) - 1 - rows) + [0, 1])
    place = graph.call(aten.cumsum.default, flat, 0)
    place = graph.call(aten.clamp.default, graph.call(aten.sub.Tensor, place, 1), 0)
    picked = graph.call(aten.index_select.default, padded, rows, place)
    own, of_mask = _sizes(graph, values, sizes), _sizes(graph, mask, shape)
    return graph.call(aten.reshape.default, picked, [*own[:rows], *of_mask, *own[rows + 1 :]])


def _sizes(graph: FusionGraph, node: fx.Node, sizes: Sequence[Any], start: int = 0) -> list[Any]:
    """Sizes of a node's dimensions as arguments, from `start`."""
    return [graph.size(node, k) if isinstance(size, torch.SymInt) else size for k, size in enumerate(sizes)][start:]
