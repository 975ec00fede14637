"""Rewrites assignments to the elements that a boolean mask selects.

In:  `aten.index_put(x, [mask], values)`, from `x[mask] = values`, where `values` requires grad
Out: `aten.where(mask, values, x)`, or `x + where(mask, values, 0)` with `accumulate`, after `values` is expanded to the
     shape of the mask
Saves a fallback to eager: the gradient of `values` would be a selection by the mask, whose size depends on data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of
from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "masked_assignments"
_IN_PLACE = aten.index_put_.default
_TARGETS = (aten.index_put.default, _IN_PLACE)
_MISMATCH = "shape mismatch: value tensor of a masked assignment cannot be broadcast to indexing result"


def write_masked_assignments(graph: FusionGraph) -> PassReport:
    """Rewrites masked assignments in a captured graph, in place."""
    fired, declined = 0, []
    for node in list(graph.graph.nodes):
        if node.target not in _TARGETS:
            continue
        assignment = _Assignment.of(node)
        if assignment is None or not graph.requires_grad(assignment.values):
            continue
        if not assignment.is_regular:
            declined.append(f"{node.name}: the values have another dtype than the tensor, or too many dimensions")
            continue
        _replace(graph, node, assignment)
        fired += 1
    return PassReport(NAME, fired, tuple(declined))


@dataclasses.dataclass(frozen=True)
class _Assignment:
    """One assignment.

    Args:
        x: the tensor that is changed.
        mask: the boolean mask.
        values: the values, broadcast to the shape of `x[..., mask, ...]`.
        before, after: the number of dimensions of `x` before and after those of the mask.
        adds: whether the values are added to the elements.
    """

    x: fx.Node
    mask: fx.Node
    values: fx.Node
    before: int
    after: int
    adds: bool

    @classmethod
    def of(cls, node: fx.Node) -> _Assignment | None:
        """The assignment of a node; None if the index is not a single mask."""
        x, indices, values, *rest = arguments_of(node)
        masks = [index for index in indices if index is not None]
        if len(masks) != 1 or _value(masks[0]).dtype != torch.bool:
            return None
        before = list(indices).index(masks[0])
        after = _value(x).dim() - before - _value(masks[0]).dim()
        return cls(x, masks[0], values, before, after, bool(rest and rest[0]))

    @property
    def rows(self) -> int | None:
        """The dimension of `values` that enumerates the selected elements; None if `values` is broadcast over them."""
        row = _value(self.values).dim() - 1 - self.after
        return row if row >= 0 else None

    @property
    def is_regular(self) -> bool:
        """Whether the values have the dtype of `x` and no more dimensions than `x[..., mask, ...]`."""
        values = _value(self.values)
        return values.dim() <= self.before + 1 + self.after and values.dtype == _value(self.x).dtype


def _value(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]


def _replace(graph: FusionGraph, node: fx.Node, assignment: _Assignment) -> None:
    with graph.graph.inserting_before(node):
        values, mask, rows = assignment.values, assignment.mask, assignment.rows
        shape = list(_value(mask).shape)
        if rows is not None:
            values = _expanded(graph, assignment, rows, shape)
        mask = graph.call(aten.reshape.default, mask, [*_sizes(graph, mask, shape), *[1] * assignment.after])
        if assignment.adds:
            added = graph.call(aten.where.ScalarOther, mask, values, 0.0)
            result = graph.call(aten.add.Tensor, assignment.x, added)
        else:
            result = graph.call(aten.where.self, mask, values, assignment.x)
        if node.target is _IN_PLACE:
            result = graph.call(aten.copy_.default, assignment.x, result)
    node.replace_all_uses_with(result)
    graph.graph.erase_node(node)


def _expanded(graph: FusionGraph, assignment: _Assignment, rows: int, shape: Sequence[Any]) -> fx.Node:
    """The values with the dimension `rows`, which enumerates selected elements, replaced by the mask's dimensions."""
    values, mask = assignment.values, assignment.mask
    sizes = list(_value(values).shape)
    if sizes[rows] == 1:
        ones = [*_sizes(graph, values, sizes[:rows]), *[1] * len(shape), *_sizes(graph, values, sizes, rows + 1)]
        return graph.call(aten.reshape.default, values, ones)
    flat = graph.call(aten.reshape.default, mask, [-1])
    count = graph.call(aten.sum.default, flat)
    matches = graph.call(aten.eq.Scalar, count, _sizes(graph, values, sizes)[rows])
    graph.call(aten._assert_async.msg, matches, _MISMATCH)
    # Elements that are not selected can use any row, so one is added in case there are none.
    padded = graph.call(aten.constant_pad_nd.default, values, [0, 0] * (len(sizes) - 1 - rows) + [0, 1])
    index = graph.call(aten.cumsum.default, flat, 0)
    index = graph.call(aten.clamp.default, graph.call(aten.sub.Tensor, index, 1), 0)
    selected = graph.call(aten.index_select.default, padded, rows, index)
    value_sizes, mask_sizes = _sizes(graph, values, sizes), _sizes(graph, mask, shape)
    return graph.call(aten.reshape.default, selected, [*value_sizes[:rows], *mask_sizes, *value_sizes[rows + 1 :]])


def _sizes(graph: FusionGraph, node: fx.Node, sizes: Sequence[Any], start: int = 0) -> list[Any]:
    """The sizes of a node's dimensions from `start`, as arguments of a call."""
    return [graph.size(node, k) if isinstance(size, torch.SymInt) else size for k, size in enumerate(sizes)][start:]
