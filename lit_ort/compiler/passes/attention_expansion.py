"""Writes attention that no kernel took with plain operators.

In:  `lit_ort.Attention(query, key, value (, mask))`
Out: `MatMul(Dropout(Softmax(MatMul(query, Transpose(key)) * scale + mask)), value)`, a boolean mask and a causal one by
     `Where` with minus infinity
Saves nothing: ONNX Runtime has no such node.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern

from lit_ort.compiler.attention import CAUSAL, DOMAIN, DROPOUT, OPERATOR, SCALE
from lit_ort.compiler.passes.base import RewritePass
from lit_ort.compiler.sizes import changes, sizes_of


class _Plain(pattern.RewriteRuleClassBase):
    def pattern(self, op, query, key, value):  # type: ignore[no-untyped-def]
        return attention_pattern(op, query, key, value)

    def rewrite(self, op, query, key, value, result):  # type: ignore[no-untyped-def]
        return _expanded(op, query, key, value, None, result)


class _Masked(pattern.RewriteRuleClassBase):
    def pattern(self, op, query, key, value, mask):  # type: ignore[no-untyped-def]
        return attention_pattern(op, query, key, value, mask)

    def rewrite(self, op, query, key, value, mask, result):  # type: ignore[no-untyped-def]
        return _expanded(op, query, key, value, mask, result)


def attention_pattern(op, *given):  # type: ignore[no-untyped-def]
    """What the rules for attention look for: a node with these inputs."""
    return getattr(op, OPERATOR)(*given, _domain=DOMAIN, _outputs=["result"], _allow_other_attributes=True)


def _expanded(op, query, key, value, mask, result: ir.Value):  # type: ignore[no-untyped-def]
    node = result.producer()
    assert node is not None
    causal = node.attributes.get_int(CAUSAL, 0)
    dropped = node.attributes.get_float(DROPOUT, 0.0)
    dtype = query.dtype
    axes = list(range(len(key.shape)))
    scores = op.MatMul(query, op.Transpose(key, perm=[*axes[:-2], axes[-1], axes[-2]]))
    scores = op.Mul(scores, _scalar(op, node.attributes.get_float(SCALE, 1.0), dtype))
    if causal:
        mask = _causal(op, query, key)
    if causal or (mask is not None and mask.dtype == ir.DataType.BOOL):
        scores = op.Where(op.Not(mask), _scalar(op, float("-inf"), dtype), scores)
    elif mask is not None:
        scores = op.Add(scores, mask)
    weights = op.Softmax(scores, axis=-1)
    if dropped > 0:
        ratio = _scalar(op, dropped, ir.DataType.FLOAT)
        weights = op.Dropout(weights, ratio, op.Constant(value=ir.tensor(True)))
    return op.MatMul(weights, value)


def _causal(op, query: ir.Value, key: ir.Value):  # type: ignore[no-untyped-def]
    """Which keys each query sees."""
    shapes = [sizes_of(value) for value in (query, key)]
    lengths = [shape[-2] for shape in shapes if shape is not None]
    if len(lengths) == 2 and not any(map(changes, lengths)):
        return op.Constant(value=ir.tensor(np.tril(np.ones(lengths, dtype=bool))))
    shape = op.Concat(*(op.Shape(value, start=-2, end=-1) for value in (query, key)), axis=0)
    ones = op.Expand(_scalar(op, 1.0, ir.DataType.FLOAT), shape)
    return op.Cast(op.Trilu(ones, upper=0), to=ir.DataType.BOOL.value)


def _scalar(op, number: float, dtype: ir.DataType | None):  # type: ignore[no-untyped-def]
    return op.Constant(value=ir.tensor(number, dtype=dtype or ir.DataType.FLOAT))


class AttentionExpansion(RewritePass):
    name = "attention_expansion"
    required = True
    rules = (_Masked, _Plain)
