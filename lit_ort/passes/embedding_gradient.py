"""Computes the gradient of an embedding table with a faster kernel, which also accumulates into another gradient.

In:  `embedding_dense_backward(gradient, indices, rows, padding_idx, False)`, alone or added to another gradient of the
     same weight, such as that of an output layer
Out: `lit_ort.embedding_gradient(...)`, or `lit_ort.embedding_gradient_onto(other, ...)` in the memory of the other
Saves, for tied weights, a table of zeros and a sum over the whole table.

Source: Press and Wolf 2017 for tied weights.
"""

from __future__ import annotations

import torch
from torch import fx

import lit_ort.ops  # noqa: F401 - registers the operators
from lit_ort._compat.torch_fx import is_alias, is_view

aten = torch.ops.aten


def fuse_embedding_gradients(module: fx.GraphModule) -> int:
    """Rewrites gradients of embedding tables in a graph, in place. Returns their number."""
    graph, fired = module.graph, 0
    order = {node: k for k, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not aten.embedding_dense_backward.default or node.args[4]:
            continue
        gradient, indices, rows, padding, _ = node.args
        target = _sum_with_other(node, order)
        with graph.inserting_before(node if target is None else target[0]):
            if target is None:
                arguments = (gradient, indices, rows, padding)
                call = graph.call_function(torch.ops.lit_ort.embedding_gradient.default, arguments)
            else:
                arguments = (target[1], gradient, indices, padding)
                call = graph.call_function(torch.ops.lit_ort.embedding_gradient_onto.default, arguments)
        original = node if target is None else target[0]
        call.meta = dict(original.meta)
        original.replace_all_uses_with(call)
        graph.erase_node(original)
        if target is not None:
            graph.erase_node(node)
        fired += 1
    return fired


def _sum_with_other(node: fx.Node, order: dict[fx.Node, int]) -> tuple[fx.Node, fx.Node] | None:
    """The sum that is the only user of a gradient, and the other gradient in it.

    None if there is no such sum, or if the memory of the other gradient has other users.
    """
    if len(node.users) != 1:
        return None
    total = next(iter(node.users))
    if total.target is not aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return None
    others = [argument for argument in total.args if argument is not node]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    other = others[0]
    if other.op != "call_function" or len(other.users) != 1:
        return None
    value, gradient = other.meta["val"], node.meta["val"]
    is_alike = tuple(value.shape) == tuple(gradient.shape) and value.dtype == gradient.dtype and value.is_contiguous()
    return (total, other) if is_alike and not is_view(other) and not is_alias(other) else None
