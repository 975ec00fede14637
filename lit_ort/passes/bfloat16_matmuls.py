"""Writes matmuls of bfloat16 factors as operators with float32 results, which regions round.

In:  `mm`, `bmm`, `addmm` and `baddbmm` in bfloat16, and casts of their results to float32; `linear_cross_entropy` of
     autocast or in bfloat16
Out: `bfloat16_matmul(left, right)` and, where its result is read in bfloat16, the sum with what is added and a cast,
     which become regions; where it is read in float32, it is not rounded; `bfloat16_cross_entropy` and casts
Saves oneDNN's copies of factors and results, and what torch computes beside the loss; native sessions compute these
operators. Matmuls reach 330 to 410 GFLOP/s where oneDNN reaches 190 to 375, with 512 rows, 256 to 8,000 columns, and
in batches of attention (AMD EPYC, family 25, model 17, two cores; float32 190 to 200).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of
from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from lit_ort.passes.exact_results import cast, rounded
from lit_ort.passes.node_builder import NodeBuilder, replace_elements, replace_nodes

aten = torch.ops.aten
_MATMUL = torch.ops.lit_ort.bfloat16_matmul.default
_LOSS = torch.ops.lit_ort.linear_cross_entropy.default
_LOW_LOSS = torch.ops.lit_ort.bfloat16_cross_entropy.default
_MATMULS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})


def multiply_bfloat16(module: fx.GraphModule) -> int:
    """Rewrites matmuls in a graph, in place. Returns their number."""
    if not has_bfloat16_matmuls():
        return 0
    fired = replace_nodes(module, _is_fit, _matmul)
    return fired + replace_elements(module, _is_low_loss, _Losses().element)


def _is_fit(node: fx.Node) -> bool:
    if node.target not in _MATMULS or node.meta["val"].dtype != torch.bfloat16:
        return False
    return all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta"))


def _matmul(builder: NodeBuilder, node: fx.Node) -> fx.Node:
    *added, left, right = arguments_of(node)
    exact = builder(_MATMUL, left, right)
    for one in added:
        exact = builder(aten.add.Tensor, exact, cast(builder, one, torch.float32))
    return rounded(builder, node, exact)


def _is_low_loss(node: fx.Node) -> bool:
    return node.target is _LOSS and (arguments_of(node)[7] or arguments_of(node)[0].meta["val"].dtype == torch.bfloat16)


class _Losses:
    """Losses that have been written; one for all results of a node."""

    def __init__(self) -> None:
        self._made: dict[fx.Node, fx.Node] = {}

    def element(self, builder: NodeBuilder, node: fx.Node, number: int, value: torch.Tensor) -> fx.Node:
        """A result of a node, from its number and an example of it."""
        if node not in self._made:
            hidden, weight, bias, labels, class_weight, ignore_index, mean, _, wanted = arguments_of(node)
            factors = (cast(builder, one, torch.bfloat16) for one in (hidden, weight))
            bias, class_weight = (one and cast(builder, one, torch.float32) for one in (bias, class_weight))
            rest = bias, labels, class_weight, ignore_index, mean, wanted
            self._made[node] = builder(_LOW_LOSS, *factors, *rest)
        return cast(builder, builder(operator.getitem, self._made[node], number), value.dtype)
