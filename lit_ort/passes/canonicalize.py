"""One form for what can be written in several ways.

In:  views that assume strides, copies and detached values of a graph without writes, changes to a type that is there,
     powers of two, sums with zeros, products with one
Out: reshapes, the values themselves, products
Saves the time of operators that do nothing; sessions keep values contiguous, so that a view is a reshape there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of

aten = torch.ops.aten
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default})
_SAME = frozenset(
    {aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
    | {aten.contiguous.default}
)
# What a value consists of alone: a number, or None where the second argument says it.
_FULL: dict[Any, float | None] = {
    aten.full.default: None,
    aten.full_like.default: None,
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
}


def canonicalize(module: fx.GraphModule) -> int:
    """Rewrites a graph in place; returns how many nodes changed."""
    graph, fired = module.graph, 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _VIEWS:
            node.target, node.args = aten.reshape.default, (node.args[0], node.args[1])
            fired += 1
        replacement = _replacement(node)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
            fired += 1
        elif node.target is aten.pow.Tensor_Scalar and node.args[1] == 2 and _is_float(node):
            node.target, node.args = aten.mul.Tensor, (node.args[0], node.args[0])
            fired += 1
    graph.eliminate_dead_code()
    return fired


def _replacement(node: fx.Node) -> fx.Node | None:
    """The value that a node only repeats."""
    rule = _RULES.get(node.target)
    return None if rule is None else rule(node)


def _first(node: fx.Node) -> fx.Node | None:
    argument = node.args[0]
    return argument if isinstance(argument, fx.Node) else None


def _same_value(node: fx.Node) -> fx.Node | None:
    return _first(node)


def _same_type_and_shape(node: fx.Node) -> fx.Node | None:
    argument = _first(node)
    return argument if argument is not None and _is_like(argument, node) else None


def _sum_with_zero(node: fx.Node) -> fx.Node | None:
    return _with_neutral(node, 0.0) if node.kwargs.get("alpha", 1) == 1 else None


def _product_with_one(node: fx.Node) -> fx.Node | None:
    return _with_neutral(node, 1.0)


def _quotient_by_one(node: fx.Node) -> fx.Node | None:
    argument = _first(node)
    by_one = _fill(node.args[1]) == 1.0
    return argument if argument is not None and by_one and _is_like(argument, node) else None


def _with_neutral(node: fx.Node, neutral: float) -> fx.Node | None:
    for argument, other in (node.args[:2], reversed(node.args[:2])):
        if isinstance(argument, fx.Node) and _fill(other) == neutral and _is_like(argument, node):
            return argument
    return None


def _fill(value: Any) -> float | None:
    """The number that a value consists of, where it is known."""
    while isinstance(value, fx.Node) and value.target in (aten.expand.default, aten.reshape.default):
        value = value.args[0]
    if isinstance(value, fx.Node) and value.target in _FULL:
        number = _FULL[value.target]
        value = value.args[1] if number is None else number
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_like(value: fx.Node, node: fx.Node) -> bool:
    """Whether a value has a node's type and shape."""
    found, wanted = value.meta.get("val"), node.meta.get("val")
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return False
    return found.dtype == wanted.dtype and found.dim() == wanted.dim() and _equal(found.shape, wanted.shape)


def _equal(first: Any, second: Any) -> bool:
    """Whether sizes are the same in every run; no guard is added to find out."""
    pairs = zip(first, second, strict=True)
    return all(a is b or str(a) == str(b) for a, b in pairs)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _transposed_back(node: fx.Node) -> fx.Node | None:
    """The value of which a node is the transpose of the transpose."""
    inner = _first(node)
    if inner is None or inner.target is not node.target or not isinstance(inner.args[0], fx.Node):
        return None
    if node.target is aten.permute.default:
        order, before = (list(arguments_of(n)[1]) for n in (node, inner))
        rank = len(order)
        back = [before[k % rank] % rank for k in order] == list(range(rank))
    else:
        rank = node.meta["val"].dim()
        swapped, before = ({d % rank for d in arguments_of(n)[1:]} for n in (node, inner))
        back = swapped == before
    return inner.args[0] if back else None


_RULES: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    **dict.fromkeys(_SAME, _same_value),
    aten._to_copy.default: _same_type_and_shape,
    aten.t.default: _transposed_back,
    aten.transpose.int: _transposed_back,
    aten.permute.default: _transposed_back,
    aten.expand.default: _same_type_and_shape,
    aten.reshape.default: _same_type_and_shape,
    aten.add.Tensor: _sum_with_zero,
    aten.mul.Tensor: _product_with_one,
    aten.div.Tensor: _quotient_by_one,
}
