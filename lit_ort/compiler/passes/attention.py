"""Computes attention in one kernel that keeps nothing of the size of the scores.

In:  `lit_ort.Attention(query[B, H, L, D], key[B, H, S, D], value[B, H, S, E] (, mask))`, float32, the mask computed
     from nothing that may want a gradient
Out: `ATen(query, key, value, ratio, settings (, mask), operator="lit_ort::attention..") -> result, seed`
Saves scores, weights and dropout masks, [B, H, L, S] each, and most of the time that visits to them take.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern

from lit_ort.compiler.attention import CAUSAL, DROPOUT, SCALE
from lit_ort.compiler.kernel_nodes import call_kernel
from lit_ort.compiler.kernels.attention import MASKED, NAME
from lit_ort.compiler.passes.attention_expansion import attention_pattern
from lit_ort.compiler.passes.base import RewritePass
from lit_ort.compiler.sizes import sizes_of


class _Plain(pattern.RewriteRuleClassBase):
    def pattern(self, op, query, key, value):  # type: ignore[no-untyped-def]
        return attention_pattern(op, query, key, value)

    def check(self, context, query, key, value, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        return _check(query, key, value, None)

    def rewrite(self, op, query, key, value, result):  # type: ignore[no-untyped-def]
        return _node(op, NAME, (query, key, value), (), result)


class _Masked(pattern.RewriteRuleClassBase):
    def pattern(self, op, query, key, value, mask):  # type: ignore[no-untyped-def]
        return attention_pattern(op, query, key, value, mask)

    def check(self, context, query, key, value, mask, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        return _check(query, key, value, mask)

    def rewrite(self, op, query, key, value, mask, result):  # type: ignore[no-untyped-def]
        return _node(op, MASKED, (query, key, value), (mask,), result)


def _check(query: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value | None) -> pattern.MatchResult:
    result = pattern.MatchResult()
    shapes = [sizes_of(given) for given in (query, key, value)]
    if any(shape is None or len(shape) != 4 for shape in shapes):
        return result.fail(f"shapes {shapes}: [batch, heads, length, width], all known, is needed")
    if len({shape[:2] for shape in shapes if shape is not None}) != 1:
        return result.fail(f"batch or heads of {shapes} differ")
    if any(given.dtype != ir.DataType.FLOAT for given in (query, key, value)):
        return result.fail(f"it computes in {query.dtype}, and float32 is proven")
    if len({query, key, value}) < 3:
        return result.fail("query, key and value are not three values, and the builder names gradients after values")
    if mask is not None and mask.dtype != ir.DataType.BOOL and _reads_floats(mask):
        return result.fail(f"the mask {mask.name} is computed from float inputs, which may want a gradient")
    return result


def _reads_floats(value: ir.Value) -> bool:
    """Whether a float input of the model takes part in a value by way of floats."""
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        if current.dtype is not None and not current.dtype.is_floating_point():
            continue
        if current.is_graph_input():
            return True
        producer = current.producer()
        for given in producer.inputs if producer is not None else ():
            if given is not None and given not in seen:
                seen.add(given)
                pending.append(given)
    return False


def _node(op, kernel: str, given, mask, result: ir.Value):  # type: ignore[no-untyped-def]
    node = result.producer()
    assert node is not None
    attributes = node.attributes
    ratio = op.Constant(value=ir.tensor(attributes.get_float(DROPOUT, 0.0), dtype=ir.DataType.FLOAT))
    settings = [attributes.get_float(SCALE, 1.0), float(attributes.get_int(CAUSAL, 0))]
    constant = op.Constant(value=ir.tensor(settings, dtype=ir.DataType.FLOAT))
    value, seed = call_kernel(op, kernel, (*given, ratio, constant, *mask), (result.shape, ir.Shape([1])))
    seed.dtype = ir.DataType.INT64
    return value


class Attention(RewritePass):
    name = "attention"
    rules = (_Masked, _Plain)
