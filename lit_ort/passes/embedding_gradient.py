"""The gradient of an embedding table, by the kernel that is faster, and onto another gradient of the same table.

In:  `embedding_dense_backward(gradient, indices, rows, padding_idx, False)`, alone or added to the gradient of an
     output layer with the same weight
Out: `lit_ort.embedding_gradient(...)`, or `lit_ort.embedding_gradient_onto(other, ...)` in the other's memory
Saves a table of zeros and a sum over the whole table where weights are tied (Press and Wolf 2017).
"""

from __future__ import annotations

import torch
from torch import fx

import lit_ort.ops  # noqa: F401 - registers the operators
from lit_ort._compat.torch_fx import is_view

aten = torch.ops.aten


def fuse_embedding_gradients(module: fx.GraphModule) -> int:
    """Rewrites a graph in place; returns how many gradients it wrote."""
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
                made = graph.call_function(torch.ops.lit_ort.embedding_gradient.default, arguments)
            else:
                arguments = (target[1], gradient, indices, padding)
                made = graph.call_function(torch.ops.lit_ort.embedding_gradient_onto.default, arguments)
        replaced = node if target is None else target[0]
        made.meta = dict(replaced.meta)
        replaced.replace_all_uses_with(made)
        graph.erase_node(replaced)
        if target is not None:
            graph.erase_node(node)
        fired += 1
    return fired


def _sum_with_other(node: fx.Node, order: dict[fx.Node, int]) -> tuple[fx.Node, fx.Node] | None:
    """The sum that alone reads a gradient, and the other gradient in it, whose memory nothing else needs."""
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
    value, wanted = other.meta["val"], node.meta["val"]
    same = tuple(value.shape) == tuple(wanted.shape) and value.dtype == wanted.dtype and value.is_contiguous()
    return (total, other) if same and not is_view(other) else None
