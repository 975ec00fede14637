"""Writes weight normalization, and its gradient, as sums and products.

In:  `_weight_norm_interface(v, g, dim)` and `_weight_norm_interface_backward`, of `torch.nn.utils.weight_norm` and
     `torch.nn.utils.parametrizations.weight_norm`
Out: operators that are computed in regions
Saves torch's calls, which compute the norm along all but the last dimension on one thread.

Source: Salimans and Kingma 2016, Weight Normalization.
"""

from __future__ import annotations

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of
from lit_ort.passes.node_builder import NodeBuilder, replace_elements

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default
_DTYPES = frozenset({torch.float32, torch.float64})


def write_weight_norms(module: fx.GraphModule) -> int:
    """Rewrites weight normalizations in a graph, in place. Returns their number."""
    return replace_elements(module, lambda node: node.target is _FORWARD and _is_fit(node, 0), _forward) + (
        replace_elements(module, lambda node: node.target is _BACKWARD and _is_fit(node, 1), _backward)
    )


def _is_fit(node: fx.Node, position: int) -> bool:
    return arguments_of(node)[position].meta["val"].dtype in _DTYPES


def _forward(builder: NodeBuilder, node: fx.Node, number: int, value: torch.Tensor) -> fx.Node:
    """The weight, or the norms."""
    v, g, dim = (*arguments_of(node), 0)[:3]
    norms = builder(aten.sqrt.default, _sums(builder, builder(aten.mul.Tensor, v, v), dim))
    if number == 1:
        return norms
    return builder(aten.mul.Tensor, v, builder(aten.div.Tensor, g, norms))


def _backward(builder: NodeBuilder, node: fx.Node, number: int, value: torch.Tensor) -> fx.Node:
    """The gradient of v, or of g."""
    grad, v, g, norms, dim = arguments_of(node)
    along = builder(aten.div.Tensor, _sums(builder, builder(aten.mul.Tensor, grad, v), dim), norms)
    if number == 1:
        return along
    direction = builder(aten.div.Tensor, v, norms)
    across = builder(aten.sub.Tensor, grad, builder(aten.mul.Tensor, direction, along))
    return builder(aten.mul.Tensor, across, builder(aten.div.Tensor, g, norms))


def _sums(builder: NodeBuilder, value: fx.Node, dim: int) -> fx.Node:
    """Sums over all dimensions but one, which is the first or the last."""
    count = value.meta["val"].dim()
    return builder(aten.sum.dim_IntList, value, [one for one in range(count) if one != dim % count], True)
