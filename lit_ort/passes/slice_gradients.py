"""Accumulates the gradients of several slices of a value in one tensor.

In:  sums of `slice_backward(gradient, sizes, dim, start, end, step)` or `select_backward(...)`, and of other gradients
     of the same value
Out: `lit_ort.add_slices(others, gradients, sizes, dims, starts, ends, steps)`
Saves, for each slice, a tensor of zeros and a sum over the whole value, as in rotary embeddings, gates and scans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

import lit_ort.ops  # noqa: F401 - registers the operators
from lit_ort._compat.torch_ops import SLICE_END

aten = torch.ops.aten


def join_slice_gradients(module: fx.GraphModule) -> int:
    """Rewrites sums of gradients of slices in a graph, in place. Returns the number of sums."""
    graph, fired = module.graph, 0
    for root in reversed(list(graph.nodes)):
        if not _is_sum(root) or any(_continues(user, root) for user in root.users):
            continue
        leaves = list(_leaves(root))
        slices = [leaf for leaf in leaves if _is_slice(leaf)]
        others = [leaf for leaf in leaves if leaf not in slices]
        if not slices or len(leaves) < 2:
            continue
        with graph.inserting_before(root):
            total = _add_slices(graph, root, slices, others)
        root.replace_all_uses_with(total)
        fired += 1
    graph.eliminate_dead_code()
    return fired


def _is_sum(node: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    return all(isinstance(argument, fx.Node) and _is_alike(argument, node) for argument in node.args)


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    a, b = node.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.is_floating_point() and a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape)


def _continues(node: fx.Node, part: fx.Node) -> bool:
    """Whether a node is a larger sum of which `part` is a partial sum without other users."""
    return len(part.users) == 1 and _is_sum(node) and node.args[0] is not node.args[1]


def _leaves(node: fx.Node) -> Iterator[fx.Node]:
    """The terms of a sum, including those of partial sums without other users."""
    left = [(argument, node) for argument in reversed(node.args)]
    while left:
        term, total = left.pop()
        assert isinstance(term, fx.Node)
        if _is_sum(term) and _continues(total, term):
            left.extend((argument, term) for argument in reversed(term.args))
        else:
            yield term


def _is_slice(node: fx.Node) -> bool:
    arguments: tuple[Any, ...] = node.args
    if len(node.users) != 1 or len(arguments) < 4 or not isinstance(arguments[2], int):
        return False
    if node.target is aten.slice_backward.default:
        return True
    # A symbolic index could be -1, for which the end of the slice is computed differently.
    return node.target is aten.select_backward.default and isinstance(arguments[3], int)


def _add_slices(graph: fx.Graph, root: fx.Node, slices: list[fx.Node], others: list[fx.Node]) -> fx.Node:
    base = None
    for other in others:
        base = other if base is None else _with_meta(graph.call_function(aten.add.Tensor, (base, other)), root)
    parts, bounds = zip(*(_part(graph, node) for node in slices), strict=True)
    dims, starts, ends, steps = ([bound[k] for bound in bounds] for k in range(4))
    arguments = (base, list(parts), slices[0].args[1], dims, starts, ends, steps)
    return _with_meta(graph.call_function(torch.ops.lit_ort.add_slices.default, arguments), root)


def _part(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, tuple[Any, Any, Any, Any]]:
    """The gradient of a slice, and its dimension, start, end and step."""
    arguments: tuple[Any, ...] = node.args
    gradient, dim = arguments[0], arguments[2] % node.meta["val"].dim()
    if node.target is aten.slice_backward.default:
        _, _, _, start, end, step = arguments
        return gradient, (dim, start, end, step)
    index = arguments[3]
    part = graph.call_function(aten.unsqueeze.default, (gradient, dim))
    part.meta["val"] = gradient.meta["val"].unsqueeze(dim)
    return part, (dim, index, SLICE_END if index == -1 else index + 1, 1)


def _with_meta(node: fx.Node, root: fx.Node) -> fx.Node:
    node.meta = {**root.meta, "val": root.meta["val"].new_empty(root.meta["val"].shape)}
    return node
