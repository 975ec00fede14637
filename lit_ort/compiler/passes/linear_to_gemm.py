"""Writes a linear layer as one two-dimensional Gemm with its bias.

In:  `MatMul(x[..., K], Transpose(w[N, K])) (+ b[N])`
Out: `Reshape(Gemm(Reshape(x, [-1, K]), w, b, transB=1), [..., N])`
Saves the transposed copy of the weight, the separate pass over the result for the bias, and gives the weight's gradient
as one Gemm in the weight's own layout.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern

from lit_ort.compiler.autocast import same_precision
from lit_ort.compiler.passes.base import RewritePass
from lit_ort.compiler.sizes import changes, product_of, reshape_to, sizes_of


class _MatMulTransposedWeight(pattern.RewriteRuleClassBase):
    def pattern(self, op, x, weight, perm):  # type: ignore[no-untyped-def]
        return op.MatMul(x, op.Transpose(weight, perm=perm))

    def check(self, context, x, weight, perm, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        return _check(x, weight, perm)

    def rewrite(self, op, x, weight, perm, **_):  # type: ignore[no-untyped-def]
        return _gemm(op, x, weight, None)


class _MatMulTransposedWeightBias(pattern.RewriteRuleClassBase):
    def pattern(self, op, x, weight, perm, bias):  # type: ignore[no-untyped-def]
        product = op.MatMul(x, op.Transpose(weight, perm=perm), _outputs=["product"])
        return op.Add(product, bias, _outputs=["total"])

    def check(self, context, x, weight, perm, bias, product, total, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        result = _check(x, weight, perm)
        shape = sizes_of(weight)
        if result and shape is not None and sizes_of(bias) != (shape[0],):
            return result.fail(f"the added value has shape {bias.shape}, and a bias has [{shape[0]}]")
        if result and not same_precision(product.producer(), total.producer()):
            return result.fail("the bias is added in another precision than that of the product")
        return result

    def rewrite(self, op, x, weight, perm, bias, **_):  # type: ignore[no-untyped-def]
        return _gemm(op, x, weight, bias)


def _check(x: ir.Value, weight: ir.Value, perm: ir.Attr) -> pattern.MatchResult:
    result = pattern.MatchResult()
    data, matrix = sizes_of(x), sizes_of(weight)
    if data is None or matrix is None:
        return result.fail(f"shapes {x.shape} and {weight.shape} are not all known")
    if changes(data[-1]) or any(map(changes, matrix)):
        return result.fail(f"the width of {x.shape} or {weight.shape} changes")
    if len(matrix) != 2 or list(perm.as_ints()) != [1, 0]:
        return result.fail(f"the second factor is {matrix} transposed by {list(perm.as_ints())}, and no matrix")
    if len(data) < 2:
        return result.fail(f"x has {len(data)} dimension, and a Gemm needs two")
    if x.dtype != ir.DataType.FLOAT:
        return result.fail(f"x is {x.dtype}, and float32 is proven")
    return result


def _gemm(op, x: ir.Value, weight: ir.Value, bias: ir.Value | None):  # type: ignore[no-untyped-def]
    data, matrix = sizes_of(x), sizes_of(weight)
    assert data is not None
    assert matrix is not None
    inputs = (weight,) if bias is None else (weight, bias)
    if len(data) == 2:
        return op.Gemm(x, *inputs, transB=1)
    assert x.shape is not None
    count = product_of(x.shape[:-1])
    rows = op.Reshape(x, op.Constant(value=ir.tensor([-1, data[-1]], dtype=ir.DataType.INT64)))
    product = op.Gemm(rows, *inputs, transB=1)
    for value, width in ((rows, data[-1]), (product, matrix[0])):
        value.dtype, value.shape = x.dtype, ir.Shape([count, width])
    return op.Reshape(product, _leading(op, x, data, matrix[0]))


def _leading(op, x: ir.Value, data: tuple[int, ...], last: int):  # type: ignore[no-untyped-def]
    """The sizes of `x` but for the last one, which is `last`."""
    if sum(map(changes, data[:-1])) < 2:
        return op.Constant(value=ir.tensor(reshape_to((*data[:-1], last)), dtype=ir.DataType.INT64))
    width = op.Constant(value=ir.tensor([last], dtype=ir.DataType.INT64))
    return op.Concat(op.Shape(x, start=0, end=-1), width, axis=0)


class LinearToGemm(RewritePass):
    name = "linear_to_gemm"
    rules = (_MatMulTransposedWeightBias, _MatMulTransposedWeight)
