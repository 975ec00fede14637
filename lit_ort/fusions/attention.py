"""Fuses attention with dropout, and attention in bfloat16, into an operator that computes a chunk of heads at a time.

In:  `aten.scaled_dot_product_attention` with a dropout probability above zero, for which torch has no fused kernel on
     the CPU, or in bfloat16, for which torch's kernel is slow
Out: `lit_ort.attention(query, key, value, mask, seed, p, causal, scale, stream)`
Saves the memory of scores and dropout masks, which the backward computes again, and the time of drawing the masks.

In bfloat16 without dropout, forward and backward take 2.2 ms, compared with 5.9 ms for torch's flash kernel, at 8 x 65
tokens and 4 heads of 64; 3.7 and 7.8 ms at 8 x 128; 10.6 and 13.1 ms at 2 x 256 and 12 heads (AMD EPYC of family 25,
two cores). Long causal attention keeps torch's kernel. So does float32 without dropout, for which torch's kernel needs
0.6 to 1.0 of the time.
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
# From this number of queries, torch's causal attention is not slower in bfloat16. With a batch of 2 and 8 heads of 64,
# the time of lit_ort's operator is 0.94 of torch's at 384 queries, 1.00 at 512, 1.54 at 768 and 1.42 at 1024.
LONG_CAUSAL = 512


def fuse_attention(graph: FusionGraph) -> PassReport:
    """Fuses attention in a captured graph, in place."""
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
    """The arguments of one call of attention."""

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
        """Why the call is not fused, or None."""
        if not isinstance(self.probability, (int, float)) or not isinstance(self.scale, (int, float, type(None))):
            return "its dropout probability or scale is not a constant"
        if self.probability == 0 and not self._is_slow_in_torch(graph):
            return "it has no dropout, so torch's fused kernel is used"
        if self.grouped:
            return "the key and value have fewer heads than the query"
        query, key, value = (node.meta["val"] for node in self.inputs)
        if any(tensor.dim() != 4 for tensor in (query, key, value)):
            return f"query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions, not 4 each"
        if any(tuple(tensor.shape[:2]) != tuple(query.shape[:2]) for tensor in (query, key, value)):
            return "the batches or heads of query, key and value are broadcast"
        if self.mask is not None and graph.requires_grad(self.mask):
            return "the mask requires grad"
        if self.mask is not None and self.mask.meta["val"].dim() > 4:
            return f"the mask has {self.mask.meta['val'].dim()} dimensions, more than 4"
        return None

    def _is_slow_in_torch(self, graph: FusionGraph) -> bool:
        query = self.inputs[0].meta["val"]
        is_low = graph.low_precision(self.node) or query.dtype == torch.bfloat16
        return is_low and not (self.causal and hint_of(query.shape[-2]) >= LONG_CAUSAL)

    def replace(self, graph: FusionGraph) -> None:
        """Replaces the call by lit_ort's operator."""
        inputs = [graph.autocast_input(value, self.node) for value in self.inputs]
        width = self.inputs[0].meta["val"].shape[-1]
        scale = 1 / math.sqrt(width) if self.scale is None else float(self.scale)
        seed, stream = (graph.seed(), graph.next_stream()) if self.probability > 0 else (None, 0)
        settings = (seed, float(self.probability), self.causal, scale, stream)
        graph.replace(self.node, torch.ops.lit_ort.attention.default, (*inputs, self.mask, *settings))
