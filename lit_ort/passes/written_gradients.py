"""Adds the gradient of a slice to what is written into the slice, not to the whole value.

In:  `select_scatter(gradient, part, dim, index) + select_backward(other, sizes, dim, index)`, as in the backward of
     `x[:, 3] *= y`, where the part is zero; the same for slices, and for slices of slices
Out: `select_scatter(gradient, part + other, dim, index)`, without the sum if the part is zero
Saves the gradient of the slice in the size of the whole value, and a sum over it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, first_argument
from lit_ort.passes.canonicalize import fill_of
from lit_ort.passes.slice_reads import bounds_of

aten = torch.ops.aten
_WRITE_OF: dict[Any, Any] = {
    aten.select_backward.default: aten.select_scatter.default,
    aten.slice_backward.default: aten.slice_scatter.default,
}


def add_before_writes(module: fx.GraphModule) -> int:
    """Rewrites sums of gradients in a graph, in place. Returns the number of sums."""
    graph, fired = module.graph, 0
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
            with graph.inserting_before(node):
                for write, gradient in (arguments_of(node), arguments_of(node)[::-1]):
                    if _is_sum_of_slice(write, gradient):
                        node.replace_all_uses_with(_sum(graph, write, gradient))
                        fired += 1
                        break
    graph.eliminate_dead_code()
    return fired


def _is_sum_of_slice(write: fx.Node, gradient: fx.Node) -> bool:
    """Whether a gradient is zero outside of the slice that a write with no other use changes."""
    if _WRITE_OF.get(gradient.target) is not write.target or len(write.users) != 1 or len(gradient.users) != 1:
        return False
    return bounds_of(write) == bounds_of(gradient) and write.meta["val"].dtype == gradient.meta["val"].dtype


def _sum(graph: fx.Graph, write: fx.Node, gradient: fx.Node) -> fx.Node:
    base, part, *bounds = arguments_of(write)
    other = first_argument(gradient)
    if _is_sum_of_slice(part, other):
        total = _sum(graph, part, other)
    elif fill_of(part) == 0:
        total = other
    else:
        total = graph.call_function(aten.add.Tensor, (part, other))
        total.meta = dict(part.meta)
    result = graph.call_function(_WRITE_OF[gradient.target], (base, total, *bounds))
    result.meta = dict(write.meta)
    return result
