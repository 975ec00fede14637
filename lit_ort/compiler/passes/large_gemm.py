"""Computes large matrix products with torch's BLAS.

In:  `Gemm(a, b (, c))`, float32, of at least `LARGE` floating-point operations, alpha 1
Out: `ATen(a, b (, c), operator="lit_ort::gemm_..")`
Saves 25 to 40 % of the product on x86 CPUs with AVX-512, and the layout of the left factor stops to matter.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern

from lit_ort.compiler.kernel_nodes import call_kernel
from lit_ort.compiler.kernels.gemm import gemm_name
from lit_ort.compiler.passes.base import RewritePass
from lit_ort.compiler.sizes import sizes_of

# Below, calling the kernel takes longer than it saves.
LARGE = 2e7


class _Gemm(pattern.RewriteRuleClassBase):
    def pattern(self, op, a, b):  # type: ignore[no-untyped-def]
        return op.Gemm(a, b, _outputs=["product"], _allow_other_attributes=True)

    def check(self, context, a, b, product, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        return _check(a, b, None, product)

    def rewrite(self, op, a, b, product, **_):  # type: ignore[no-untyped-def]
        return _node(op, product, a, b)


class _GemmBias(pattern.RewriteRuleClassBase):
    def pattern(self, op, a, b, c):  # type: ignore[no-untyped-def]
        return op.Gemm(a, b, c, _outputs=["product"], _allow_other_attributes=True)

    def check(self, context, a, b, c, product, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        return _check(a, b, c, product)

    def rewrite(self, op, a, b, c, product, **_):  # type: ignore[no-untyped-def]
        return _node(op, product, a, b, c)


def _check(a: ir.Value, b: ir.Value, c: ir.Value | None, product: ir.Value) -> pattern.MatchResult:
    result = pattern.MatchResult()
    node = product.producer()
    assert node is not None
    left, right = sizes_of(a), sizes_of(b)
    if left is None or right is None or len(left) != 2 or len(right) != 2:
        return result.fail(f"shapes {a.shape} and {b.shape}: two known dimensions are needed")
    if a.dtype != ir.DataType.FLOAT:
        return result.fail(f"the factors are {a.dtype}, and float32 is proven")
    if node.attributes.get_float("alpha", 1.0) != 1.0 or (c and node.attributes.get_float("beta", 1.0) != 1.0):
        return result.fail("alpha or beta is not 1")
    columns = right[0] if node.attributes.get_int("transB", 0) else right[1]
    operations = 2.0 * left[0] * left[1] * columns
    if operations < LARGE:
        return result.fail(f"{operations:.1e} operations are fewer than {LARGE:.0e}")
    return result


def _node(op, product: ir.Value, *inputs: ir.Value):  # type: ignore[no-untyped-def]
    node = product.producer()
    assert node is not None
    transposes = (bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB"))
    return call_kernel(op, gemm_name(*transposes, bias=len(inputs) == 3), inputs, (product.shape,))


class LargeGemm(RewritePass):
    name = "large_gemm"
    rules = (_GemmBias, _Gemm)
