"""GELU and its gradient by torch, exact or with tanh, in float32 or bfloat16, into memory that is kept.

Source: Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

import torch

from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool

# torch's names of the two: with the error function, and with tanh in its place.
EXACT, TANH = "none", "tanh"


def gelu_name(approximate: str, gradient: bool = False) -> str:
    """Name of the kernel."""
    return f"gelu{'_tanh' if approximate == TANH else ''}{'_gradient' if gradient else ''}"


def _forward(approximate: str) -> Kernel:
    def run(pool: BufferPool, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.gelu.out(x, approximate=approximate, out=pool.empty(*x.shape, dtype=x.dtype))

    return Kernel(gelu_name(approximate), run)


def _backward(approximate: str) -> Kernel:
    def run(pool: BufferPool, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        into = pool.empty(*x.shape, dtype=x.dtype)
        return torch.ops.aten.gelu_backward.grad_input(gradient, x, approximate=approximate, grad_input=into)

    return Kernel(gelu_name(approximate, gradient=True), run)


GELU_KERNELS: tuple[Kernel, ...] = tuple(make(kind) for make in (_forward, _backward) for kind in (EXACT, TANH))
