"""Lets reads of slices look past writes into other slices of the same value.

In:  `select(written, dim, index)` or `slice(written, dim, start, end, step)`, where `written` is
     `select_scatter(base, part, dim, index)` or `slice_scatter(base, part, dim, start, end, step)`
Out: the same read of `base` if the two share no index, and `part` if they are the same; `base` for a write of what is
     there already
Saves writes whose results are no longer read, as in the backward of a loop over columns.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, first_argument
from lit_ort._compat.torch_ops import BY_STRIDES
from lit_ort.ops.slices import are_disjoint
from lit_ort.ops.writes import IN_PLACE

aten = torch.ops.aten
READS = frozenset({aten.select.int, aten.slice.Tensor})
_SELECTS = frozenset({aten.select.int, aten.select_scatter.default, aten.select_backward.default})
# The read of the slice that an operator writes.
READ_OF: dict[Any, Any] = {aten.select_scatter.default: aten.select.int, aten.slice_scatter.default: aten.slice.Tensor}
# The default values of a slice's dimension, start, end and step.
_DEFAULTS = (0, None, None, 1)


def look_past_writes(module: fx.GraphModule) -> int:
    """Rewrites reads and writes of slices in a graph, in place. Returns the number of rewrites."""
    graph = module.graph
    nodes = list(graph.nodes)
    fired = sum(_replace(node, first_argument(node)) for node in nodes if node.target in READ_OF and _is_of_base(node))
    # Both parts of a nested write have to be of one value.
    nested = {first_argument(part) for node in nodes if (part := nested_write(node)) is not None}
    fired += sum(_look_past(node) for node in nodes if node.target in READS and node not in nested)
    graph.eliminate_dead_code()
    return fired


def nested_write(write: fx.Node) -> fx.Node | None:
    """The write into a slice of a value whose result a write copies into the same slice of the value, or None."""
    if write.target not in READ_OF:
        return None
    base, part = arguments_of(write)[:2]
    view = part.args[0] if part.target in IN_PLACE and len(part.users) == 1 else None
    if not isinstance(view, fx.Node) or view.target not in READS or first_argument(view) is not base:
        return None
    is_like = part.meta["val"].dtype == view.meta["val"].dtype
    return part if is_like and is_same_slice(view, write) else None


def bounds_of(node: fx.Node) -> tuple[Any, ...]:
    """The dimension and the index, or the start, end and step, of a read or write of a slice or of its gradient."""
    bounds = arguments_of(node)[1 if node.target in READS else 2 :]
    # Comparing sizes as text adds no guards.
    bounds = tuple(str(bound.meta["val"]) if isinstance(bound, fx.Node) else bound for bound in bounds)
    return bounds if node.target in _SELECTS else (*bounds, *_DEFAULTS[len(bounds) :])


def is_same_slice(read: fx.Node, write: fx.Node) -> bool:
    """Whether a `select` or `slice` reads what a `select_scatter` or `slice_scatter` into its first argument writes."""
    if READ_OF[write.target] is not read.target:
        return False
    indices = indices_of(read)
    return bounds_of(read) == bounds_of(write) or (indices is not None and indices == indices_of(write))


def indices_of(node: fx.Node) -> tuple[int, range] | None:
    """The dimension and the indices of a read or write of a slice; None if they are not known."""
    bounds = bounds_of(node)
    if not all(bound is None or isinstance(bound, int) for bound in bounds):
        return None
    whole = first_argument(node).meta["val"]
    dim = bounds[0] % whole.dim()
    size = whole.shape[dim]
    if isinstance(size, int):
        # A negative index counts from the end.
        every = range(size)
        return dim, every[bounds[1] :][:1] if node.target in _SELECTS else every[slice(*bounds[1:])]
    start, end, step = (bounds[1], bounds[1] + 1, 1) if node.target in _SELECTS else bounds[1:]
    start, end = start or 0, sys.maxsize if end is None else end
    return (dim, range(start, end, step)) if start >= 0 and end >= 0 else None


def _is_of_base(write: fx.Node) -> bool:
    """Whether a write copies a slice to where it comes from."""
    base, part = arguments_of(write)[:2]
    return part.target in READS and first_argument(part) is base and is_same_slice(part, write)


def _look_past(read: fx.Node) -> int:
    fired = 0
    while first_argument(read).target in READ_OF:
        write = first_argument(read)
        if is_same_slice(read, write):
            return fired + _replace(read, arguments_of(write)[1])
        if _is_bound(read) or not _are_apart(read, write):
            break
        read.update_arg(0, first_argument(write))
        fired += 1
    return fired


def _are_apart(first: fx.Node, second: fx.Node) -> bool:
    """Whether reads or writes of slices of values of one shape are known to share no index."""
    a, b = indices_of(first), indices_of(second)
    return a is not None and b is not None and a[0] == b[0] and are_disjoint(a[1], b[1])


def _replace(node: fx.Node, value: fx.Node) -> int:
    if _is_bound(node) or value.meta["val"].dtype != node.meta["val"].dtype:
        return 0
    node.replace_all_uses_with(value)
    return 1


def _is_bound(node: fx.Node) -> bool:
    """Whether an operator depends on the strides of a value."""
    return any(user.target in BY_STRIDES for user in node.users)
