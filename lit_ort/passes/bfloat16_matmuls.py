"""Writes matmuls of bfloat16 factors as operators with float32 results, which regions round.

In:  `mm`, `bmm`, `addmm` and `baddbmm` in bfloat16, and casts of their results to float32; `linear_cross_entropy` of
     autocast or in bfloat16
Out: `bfloat16_matmul(left, right)` and, where its result is read in bfloat16, the sum with what is added and a cast,
     which become regions; where it is read in float32, it is not rounded; `bfloat16_cross_entropy` and casts
Saves oneDNN's copies of factors and results, which take as long as small matmuls; native sessions compute these
operators.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, is_view
from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from lit_ort.passes.node_builder import NodeBuilder, replace_elements

aten = torch.ops.aten
_MATMUL = torch.ops.lit_ort.bfloat16_matmul.default
_LOSS = torch.ops.lit_ort.linear_cross_entropy.default
_LOW_LOSS = torch.ops.lit_ort.bfloat16_cross_entropy.default
_PLAIN = frozenset({aten.mm.default, aten.bmm.default})
_ADDED = frozenset({aten.addmm.default, aten.baddbmm.default})
_CAST = aten._to_copy.default


def multiply_bfloat16(module: fx.GraphModule) -> int:
    """Rewrites matmuls in a graph, in place. Returns their number."""
    if not has_bfloat16_matmuls():
        return 0
    nodes = [node for node in module.graph.nodes if _is_fit(node)]
    for node in nodes:
        with module.graph.inserting_before(node):
            _replace(NodeBuilder(module.graph, node.meta), node)
    return len(nodes) + replace_elements(module, _is_low_loss, _Losses().element)


def _is_low_loss(node: fx.Node) -> bool:
    return node.target is _LOSS and (arguments_of(node)[7] or arguments_of(node)[0].meta["val"].dtype == torch.bfloat16)


class _Losses:
    """Losses that have been written; one for all results of a node."""

    def __init__(self) -> None:
        self._made: dict[fx.Node, fx.Node] = {}

    def element(self, builder: NodeBuilder, node: fx.Node, number: int, value: torch.Tensor) -> fx.Node:
        if node not in self._made:
            hidden, weight, bias, labels, class_weight, ignore_index, mean, _, wanted = arguments_of(node)
            factors = (_cast(builder, one, torch.bfloat16) for one in (hidden, weight))
            bias, class_weight = (one and _cast(builder, one, torch.float32) for one in (bias, class_weight))
            rest = bias, labels, class_weight, ignore_index, mean, wanted
            self._made[node] = builder(_LOW_LOSS, *factors, *rest)
        return _cast(builder, builder(operator.getitem, self._made[node], number), value.dtype)


def _cast(builder: NodeBuilder, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if node.meta["val"].dtype == dtype else builder(_CAST, node, dtype=dtype)


def _is_fit(node: fx.Node) -> bool:
    if node.target not in _PLAIN | _ADDED or node.meta["val"].dtype != torch.bfloat16:
        return False
    return all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta"))


def _replace(builder: NodeBuilder, node: fx.Node) -> None:
    *added, left, right = arguments_of(node)
    exact = builder(_MATMUL, left, right)
    for one in added:
        exact = builder(aten.add.Tensor, exact, _cast(builder, one, torch.float32))
    _read_exactly(node, exact)
    if node.users:
        node.replace_all_uses_with(_cast(builder, exact, torch.bfloat16))
    node.graph.erase_node(node)


def _read_exactly(node: fx.Node, exact: fx.Node) -> None:
    """Replaces casts of a value, and of its views, to float32 by a value that is not rounded."""
    for user in list(node.users):
        if _is_exact_cast(user):
            user.replace_all_uses_with(exact)
            node.graph.erase_node(user)
        elif _has_exact_casts(user):
            with node.graph.inserting_before(user):
                _, *sizes = user.args
                view = NodeBuilder(node.graph, user.meta)(user.target, exact, *sizes, **user.kwargs)
            _read_exactly(user, view)
            if not user.users:
                node.graph.erase_node(user)


def _has_exact_casts(node: fx.Node) -> bool:
    """Whether a node is a view of which a cast, or a view with casts, reads the elements."""
    return is_view(node) and any(_is_exact_cast(user) or _has_exact_casts(user) for user in node.users)


def _is_exact_cast(node: fx.Node) -> bool:
    """Whether a node casts to float32 and does nothing else."""
    return node.target is _CAST and node.kwargs == {"dtype": torch.float32}
