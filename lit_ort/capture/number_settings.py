"""Writes settings of operators that are numbers as arithmetic, so that one graph is for every value of them.

In:  `x.add_(y, alpha=n)`, `torch.full_like(x, n)`, and operators of lists of tensors, such as
     `torch._foreach_mul_(xs, n)`, which averages of weights use
Out: `x.add_(y * n)`, `torch.full_like(x, -0.0) + n`, and the operator of each tensor
Saves a compilation for each value of a number that changes, such as a momentum that follows a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

# In 16 bits, the product would be rounded.
_DTYPES = frozenset({torch.float32, torch.float64})
_FUNCTIONS = frozenset({torch.add, torch.sub})
_METHODS = frozenset({"add", "sub", "add_", "sub_"})
# The method that each operator of lists calls, for each tensor.
_OF_LISTS: MappingProxyType[Callable[..., Any], str] = MappingProxyType(
    {getattr(torch, f"_foreach_{name}_"): f"{name}_" for name in ("add", "sub", "mul", "div", "lerp")}
)
_FILLED = frozenset({torch.full, torch.full_like})


def write_settings_as_arithmetic(graph: fx.Graph, numbers: Container[fx.Node]) -> None:
    """Rewrites a graph of Dynamo in place.

    Args:
        graph: its nodes have example values.
        numbers: the nodes that are numbers.
    """
    for node in list(graph.nodes):
        if node.target in _OF_LISTS and any(argument in numbers for argument in node.all_input_nodes):
            _write_each(graph, node)
    for node in list(graph.nodes):
        is_sum = node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS)
        if is_sum and set(node.kwargs) == {"alpha"} and node.kwargs["alpha"] in numbers and _has_factor(node):
            with graph.inserting_before(node):
                product = graph.call_function(torch.mul, (node.args[1], node.kwargs["alpha"]))
            product.meta = {**node.meta, "example_value": _value(node.args[1])}
            node.args, node.kwargs = (node.args[0], product), {}
        elif node.target in _FILLED and any(argument in numbers for argument in node.all_input_nodes):
            _write_filled(graph, node)


def _write_each(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces an operator of lists in place by that of each tensor."""
    tensors, *others = node.args
    if node.users or not isinstance(tensors, list | tuple):
        return
    for position, tensor in enumerate(tensors):
        own = [other[position] if isinstance(other, list | tuple) else other for other in others]
        with graph.inserting_before(node):
            made = graph.call_method(_OF_LISTS[node.target], (tensor, *own), dict(node.kwargs))  # type: ignore[index]
        made.meta = {**node.meta, "example_value": _value(tensor)}
    graph.erase_node(node)


def _write_filled(graph: fx.Graph, node: fx.Node) -> None:
    """Writes a tensor of a number as a sum."""
    value = _value(node)
    if len(node.args) != 2 or node.kwargs.get("requires_grad") or not value.is_floating_point():
        return
    like, number = node.args
    with graph.inserting_before(node):
        # The sum of this zero and another one has the sign of the other.
        zeros = graph.call_function(node.target, (like, -0.0), {**node.kwargs, "dtype": value.dtype})  # type: ignore[arg-type]
    zeros.meta = dict(node.meta)
    node.target, node.args, node.kwargs = torch.add, (zeros, number), {}


def _has_factor(node: fx.Node) -> bool:
    values = [_value(argument) for argument in node.args]
    return len(values) == 2 and all(isinstance(one, torch.Tensor) and one.dtype in _DTYPES for one in values)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None
