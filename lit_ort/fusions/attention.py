"""Attention with dropout, or in bfloat16, a chunk of heads at a time.

In:  `aten.scaled_dot_product_attention` with a dropout probability above zero, for which torch has no fused kernel on
     CPUs, or in bfloat16, in which torch's is slow
Out: `lit_ort.attention(query, key, value, mask, seed, p, causal, scale, stream)`
Saves the memory of scores and masks, which the backward computes again, and the time of drawing masks.

In bfloat16 without dropout, forward and backward take 2.2 ms for the 5.9 of torch's flash kernel at 8 x 65 tokens and 4
heads of 64, 3.7 for 7.8 at 8 x 128 and 10.6 for 13.1 at 2 x 256 and 12 heads (AMD EPYC of family 25, two cores). Long
causal ones are torch's, and so is all of float32, where torch's take 0.6 to 1.0 of the time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of
from lit_ort._compat.torch_sizes import hint_of
from lit_ort.fusions.graph import FusionGraph
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "attention"
# Queries from which on causal attention of torch's is no slower in bfloat16: at 2 rows and 8 heads of 64 the operator
# here takes 0.94 of its time at 384, 1.00 at 512, 1.54 at 768 and 1.42 at 1024.
LONG_CAUSAL = 512


def fuse_attention(graph: FusionGraph) -> PassReport:
    """Rewrites a captured graph in place."""
    fired, declined = 0, []
    for node in list(graph.graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        call = _Call.of(node)
        reason = call.obstacle(graph)
        if reason is None:
            call.replace(graph)
            fired += 1
        else:
            declined.append(f"{node.name}: {reason}")
    return PassReport(NAME, fired, tuple(declined))


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of one call."""

    node: fx.Node
    inputs: tuple[fx.Node, fx.Node, fx.Node]
    mask: fx.Node | None
    probability: Any
    causal: bool
    scale: Any
    grouped: bool

    @classmethod
    def of(cls, node: fx.Node) -> _Call:
        def argument(position: int, name: str, default: Any) -> Any:
            return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)

        query, key, value = arguments_of(node)[:3]
        return cls(
            node,
            (query, key, value),
            argument(3, "attn_mask", None),
            argument(4, "dropout_p", 0.0),
            argument(5, "is_causal", False),
            node.kwargs.get("scale"),
            bool(node.kwargs.get("enable_gqa", False)),
        )

    def obstacle(self, graph: FusionGraph) -> str | None:
        """Why torch's own operator stays, or None."""
        if not isinstance(self.probability, (int, float)) or not isinstance(self.scale, (int, float, type(None))):
            return "its dropout probability or scale is computed"
        if self.probability == 0 and not self._is_slow_in_torch(graph):
            return "it has no dropout, and torch has a fused kernel"
        if self.grouped:
            return "its keys and values have fewer heads than its queries"
        values = [value.meta["val"] for value in self.inputs]
        if any(value.dim() != 4 for value in values):
            return f"its query has {values[0].dim()} dimensions, not 4"
        if any(tuple(value.shape[:2]) != tuple(values[0].shape[:2]) for value in values):
            return "its batches or heads are broadcast"
        if self.mask is not None and graph.needs_gradient(self.mask):
            return "its mask needs a gradient"
        if self.mask is not None and self.mask.meta["val"].dim() > 4:
            return "its mask has more than 4 dimensions"
        return None

    def _is_slow_in_torch(self, graph: FusionGraph) -> bool:
        query = self.inputs[0].meta["val"]
        is_low = graph.low_precision(self.node) or query.dtype == torch.bfloat16
        return is_low and not (self.causal and hint_of(query.shape[-2]) >= LONG_CAUSAL)

    def replace(self, graph: FusionGraph) -> None:
        """Puts the project's operator in the call's place."""
        inputs = [graph.in_products(value, self.node) for value in self.inputs]
        width = self.inputs[0].meta["val"].shape[-1]
        scale = 1 / math.sqrt(width) if self.scale is None else float(self.scale)
        drawn = (graph.seed(), graph.next_stream()) if self.probability > 0 else (None, 0)
        settings = (drawn[0], float(self.probability), self.causal, scale, drawn[1])
        graph.replace(self.node, torch.ops.lit_ort.attention.default, (*inputs, self.mask, *settings))
