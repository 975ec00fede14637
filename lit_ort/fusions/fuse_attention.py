"""Writes attention to few keys as matmuls and a softmax, and fuses other attention that torch computes slowly.

In:  `aten.scaled_dot_product_attention`
Out: to few keys, two batched matmuls, which ONNX Runtime computes, with scale, mask, softmax and dropout between them,
     which become regions; the backward keeps the probabilities. To more keys, with a dropout probability above zero,
     for which torch has no fused kernel on the CPU, or in bfloat16, for which torch's kernel is slow:
     `lit_ort.attention(query, key, value, mask, seed, p, causal, scale, stream)`, an operator that computes a chunk of
     heads at a time, without the memory of scores and dropout masks, which the backward computes again
Saves the time of torch's kernels, forward and backward of a step of BERT 61.1 ms for 61.9, of GPT-2 93 for 101, of ViT
     53.0 for 53.3, of Llama 94 for 93 (Intel Xeon, family 6, two threads), and keeps attention in native sessions.

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

from lit_ort._compat.devices import is_cpu
from lit_ort._compat.torch_fx import arguments_of
from lit_ort._compat.torch_sizes import hint_of, inverse_order, memory_order
from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "attention"
# From this number of queries, torch's causal attention is not slower in bfloat16. With a batch of 2 and 8 heads of 64,
# the time of lit_ort's operator is 0.94 of torch's at 384 queries, 1.00 at 512, 1.54 at 768 and 1.42 at 1024.
LONG_CAUSAL = 512
# The probabilities of so many keys take half of the memory of the other activations of a layer, with heads of 64; with
# dropout, eager keeps them three times.
MOST_KEYS, MOST_KEYS_WITH_DROPOUT = 256, 512
_EXACT = frozenset({torch.float32, torch.float64})


def fuse_attention(graph: FusionGraph) -> PassReport:
    """Fuses attention in a captured graph, in place."""
    fired, declined = 0, []
    for node in list(graph.graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        call = _Call.of(node)
        if call.is_short(graph):
            call.expand(graph)
            fired += 1
            continue
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
        if not self._has_constants:
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

    @property
    def _has_constants(self) -> bool:
        """Whether the dropout probability and the scale are the same in every call."""
        return isinstance(self.probability, (int, float)) and isinstance(self.scale, (int, float, type(None)))

    @property
    def _factor(self) -> float:
        """The factor of the scores."""
        return 1 / math.sqrt(self.inputs[0].meta["val"].shape[-1]) if self.scale is None else float(self.scale)

    def is_short(self, graph: FusionGraph) -> bool:
        """Whether the call is written as matmuls and a softmax."""
        query, key, _ = (node.meta["val"] for node in self.inputs)
        if self.grouped or not self._has_constants:
            return False
        has_kernel = has_bfloat16_matmuls() if self._is_low(graph) else query.dtype in _EXACT
        if not has_kernel:
            return False
        keys = hint_of(key.shape[-2])
        most = MOST_KEYS_WITH_DROPOUT if self.probability > 0 else MOST_KEYS
        return is_cpu(query.device) and keys is not None and keys <= most

    def _is_low(self, graph: FusionGraph) -> bool:
        """Whether the matmuls are in bfloat16."""
        return graph.low_precision(self.node) or self.inputs[0].meta["val"].dtype == torch.bfloat16

    def _is_slow_in_torch(self, graph: FusionGraph) -> bool:
        query = self.inputs[0].meta["val"]
        return self._is_low(graph) and not (self.causal and hint_of(query.shape[-2]) >= LONG_CAUSAL)

    def expand(self, graph: FusionGraph) -> None:
        """Writes the call as matmuls and a softmax, with the strides of its result."""
        query, key, value = self.inputs
        with graph.instead_of(self.node):
            is_low = self._is_low(graph)
            if is_low:
                query, key, value = (_cast(graph, one, torch.bfloat16) for one in self.inputs)
            else:
                query = graph.call(aten.mul.Scalar, query, self._factor)
            scores = graph.call(aten.matmul.default, query, graph.call(aten.transpose.int, key, -2, -1))
            if is_low:
                # The matmul has computed them in float32, in which the softmax reads them.
                scores = graph.call(aten.mul.Scalar, _cast(graph, scores, torch.float32), self._factor)
            weights = self._softmax(graph, self._masked(graph, scores))
            if self.probability > 0:
                weights = graph.call(aten.dropout.default, weights, self.probability, True)
            if is_low:
                weights = _cast(graph, weights, torch.bfloat16)
            result = graph.call(aten.matmul.default, weights, value)
            order = memory_order(self.node.meta["val"])
            if order is not None and order != list(range(len(order))):
                ordered = graph.call(aten.contiguous.default, graph.call(aten.permute.default, result, order))
                result = graph.call(aten.permute.default, ordered, inverse_order(order))
        self.node.replace_all_uses_with(result)
        graph.graph.erase_node(self.node)

    def _masked(self, graph: FusionGraph, scores: fx.Node) -> fx.Node:
        """Scores with minus infinity for hidden keys."""
        if self.causal:
            query, key, _ = self.inputs
            rows = graph.call(aten.unsqueeze.default, _positions(graph, query), -1)
            before = graph.call(aten.ge.Tensor, rows, _positions(graph, key))
            scores = graph.call(aten.where.ScalarOther, before, scores, -math.inf)
        if self.mask is None:
            return scores
        if self.mask.meta["val"].dtype == torch.bool:
            return graph.call(aten.where.ScalarOther, self.mask, scores, -math.inf)
        return graph.call(aten.add.Tensor, scores, self.mask)

    def _softmax(self, graph: FusionGraph, scores: fx.Node) -> fx.Node:
        # A query to which all keys are hidden has the result 0.
        if self.mask is not None:
            return graph.call(aten._safe_softmax.default, scores, -1)
        return graph.call(aten.softmax.int, scores, -1)

    def replace(self, graph: FusionGraph) -> None:
        """Replaces the call by lit_ort's operator."""
        inputs = [graph.autocast_input(value, self.node) for value in self.inputs]
        seed, stream = (graph.seed(), graph.next_stream()) if self.probability > 0 else (None, 0)
        settings = (seed, float(self.probability), self.causal, self._factor, stream)
        graph.replace(self.node, torch.ops.lit_ort.attention.default, (*inputs, self.mask, *settings))


def _cast(graph: FusionGraph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    return value if value.meta["val"].dtype == dtype else graph.call(aten.to.dtype, value, dtype)


def _positions(graph: FusionGraph, values: fx.Node) -> fx.Node:
    return graph.call(aten.arange.default, graph.size(values, -2))
