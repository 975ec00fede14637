"""Computes a weight gradient that is much taller than wide in the other order.

In:  `Gemm(a[K, M], b[K, N], transA=1)` with M at least four times N and large
Out: `Transpose(MatMul(Transpose(b), a))`
Saves about a fifth of the product: the kernel packs a transposed left factor slowly, and the two transposes are small
beside it.
"""

from __future__ import annotations

from onnxscript.rewriter import pattern

from lit_ort.compiler.passes.base import RewritePass
from lit_ort.compiler.sizes import sizes_of

TALL = 4
LARGE = 4096


class _TransposedLeft(pattern.RewriteRuleClassBase):
    def pattern(self, op, a, b):  # type: ignore[no-untyped-def]
        return op.Gemm(a, b, transA=1, _outputs=["product"], _allow_other_attributes=True)

    def check(self, context, a, b, product, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        result = pattern.MatchResult()
        attributes = product.producer().attributes
        left, right = sizes_of(a), sizes_of(b)
        if left is None or right is None:
            return result.fail(f"shapes {a.shape} and {b.shape} are not all known")
        if attributes.get_int("transB", 0) or attributes.get_float("alpha", 1.0) != 1.0:
            return result.fail("transB or alpha is set")
        if left[1] < LARGE or left[1] < TALL * right[1]:
            rule = f"at least {LARGE} rows and {TALL} times as many rows as columns"
            return result.fail(f"the result [{left[1]}, {right[1]}] is not tall: {rule}")
        return result

    def rewrite(self, op, a, b, **_):  # type: ignore[no-untyped-def]
        return op.Transpose(op.MatMul(op.Transpose(b, perm=[1, 0]), a), perm=[1, 0])


class TallGemm(RewritePass):
    name = "tall_gemm"
    rules = (_TransposedLeft,)
