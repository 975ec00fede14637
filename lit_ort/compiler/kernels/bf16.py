"""Matrix products in bfloat16: factors rounded, sums kept in float32, each result rounded once.

Factors and biases may come in float32 or already rounded. A kernel's result is float32; that of the kernel whose name
ends with `_rounded` stays in bfloat16.

Source: mixed precision with float32 weights, Micikevicius et al. 2018.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lit_ort.runtime.aten import Backward, Kernel
from lit_ort.runtime.buffers import BufferPool

# Ends of the names of kernels with products in bfloat16, and of those whose results stay in it.
BF16, ROUNDED = "_bf16", "_rounded"
GRADIENT = "_gradient"
ROUND, ROW_SUM = "bf16_round", "bf16_row_sum"


def gemm_name(transpose_a: bool, transpose_b: bool, bias: bool = False) -> str:
    """Name of the kernel for a product of two matrices."""
    return f"bf16_gemm_{'nt'[transpose_a]}{'nt'[transpose_b]}{'_bias' if bias else ''}"


def matmul_name(transpose_a: bool, transpose_b: bool) -> str:
    """Name of the kernel for products of stacked matrices, with equal leading dimensions."""
    return f"bf16_matmul_{'nt'[transpose_a]}{'nt'[transpose_b]}"


def rounded(pool: BufferPool, data: torch.Tensor) -> torch.Tensor:
    """`data` in bfloat16."""
    return pool.cast(data, torch.bfloat16)


def row_sum(pool: BufferPool, data: torch.Tensor) -> torch.Tensor:
    """The sum of a matrix's rows in float32, which is the gradient of a bias."""
    return torch.sum(data, 0, dtype=torch.float32, out=pool.empty(data.shape[1]))


def _gemm(transpose_a: bool, transpose_b: bool, bias: bool, narrow: bool) -> Kernel:
    def run(pool: BufferPool, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        left, right = rounded(pool, a), rounded(pool, b)
        left, right = left.t() if transpose_a else left, right.t() if transpose_b else right
        result = pool.empty(left.shape[0], right.shape[1], dtype=torch.bfloat16)
        if added is not None and narrow:
            return torch.addmm(rounded(pool, added), left, right, out=result)
        torch.mm(left, right, out=result)
        if narrow:
            return result
        wide = pool.empty(*result.shape)
        return wide.copy_(result) if added is None else torch.add(result, added, out=wide)

    return _kernel(gemm_name(transpose_a, transpose_b, bias), run, (0, 1, 2) if bias else (0, 1), narrow)


def _matmul(transpose_a: bool, transpose_b: bool, narrow: bool) -> Kernel:
    def run(pool: BufferPool, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left, right = (rounded(pool, factor).flatten(0, -3) for factor in (a, b))
        left, right = left.mT if transpose_a else left, right.mT if transpose_b else right
        shape = (*a.shape[:-2], left.shape[1], right.shape[2])
        result = pool.empty(len(left), *shape[-2:], dtype=torch.bfloat16)
        torch.bmm(left, right, out=result)
        return (result if narrow else pool.empty(*result.shape).copy_(result)).view(shape)

    return _kernel(matmul_name(transpose_a, transpose_b), run, (0, 1), narrow)


def _kernel(name: str, run: Callable[..., torch.Tensor], wants: tuple[int, ...], narrow: bool) -> Kernel:
    # A pass writes the gradient's node as the products that it stands for.
    backward = Backward(name + GRADIENT, ("GO(0)", "I(0)", "I(1)"), wants)
    return Kernel(name + ROUNDED, run) if narrow else Kernel(name, run, backward=backward)


_BOTH = (False, True)
BF16_KERNELS: tuple[Kernel, ...] = (
    *(_gemm(a, b, bias, narrow) for a in _BOTH for b in _BOTH for bias in _BOTH for narrow in _BOTH),
    *(_matmul(a, b, narrow) for a in _BOTH for b in _BOTH for narrow in _BOTH),
    Kernel(ROUND, rounded),
    Kernel(ROW_SUM, row_sum),
)
