"""Matrix products by torch, into memory that is kept: `a` and `b` as they are or transposed, with or without bias."""

from __future__ import annotations

import torch

from lit_ort.compiler.kernels.product import product
from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool


def gemm_name(transpose_a: bool, transpose_b: bool, bias: bool) -> str:
    """Name of the kernel for a product of these kinds."""
    return f"gemm_{'nt'[transpose_a]}{'nt'[transpose_b]}{'_bias' if bias else ''}"


def _kernel(transpose_a: bool, transpose_b: bool, bias: bool) -> Kernel:
    def run(pool: BufferPool, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        left = a.t() if transpose_a else a
        right = b.t() if transpose_b else b
        return product(left, right, pool.empty(left.shape[0], right.shape[1]), added)

    return Kernel(gemm_name(transpose_a, transpose_b, bias), run)


GEMM_KERNELS: tuple[Kernel, ...] = tuple(
    _kernel(transpose_a, transpose_b, bias)
    for transpose_a in (False, True)
    for transpose_b in (False, True)
    for bias in (False, True)
)
