"""Layer normalisation over the last dimension and its gradient by torch, into memory that is kept.

Source: Ba, Kiros and Hinton 2016.
"""

from __future__ import annotations

import torch

from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool

LAYER_NORM, LAYER_NORM_GRADIENT = "layer_norm", "layer_norm_gradient"

aten = torch.ops.aten


def layer_norm(
    pool: BufferPool, x: torch.Tensor, scale: torch.Tensor, epsilon: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x - mean) / sqrt(variance + epsilon) scale + bias.

    Args:
        x: float32[..., width]. scale, bias: float32[width]. epsilon: float32[].

    Returns:
        float32[..., width], the mean and one over the standard deviation of each row, float32[..., 1].
    """
    result, mean, inverse = aten.native_layer_norm(x, scale.shape, scale, bias, float(epsilon))
    return _kept(pool, result), mean, inverse


def layer_norm_gradient(
    pool: BufferPool,
    gradient: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, scale and bias, from that of the result, what `layer_norm` was given and what it found."""
    of_x, of_scale, of_bias = aten.native_layer_norm_backward(
        gradient, x, scale.shape, mean, inverse, scale, scale, (True, True, True)
    )
    return _kept(pool, of_x), of_scale, of_bias


def _kept(pool: BufferPool, fresh: torch.Tensor) -> torch.Tensor:
    """torch gives these operators memory of its own."""
    return pool.empty(*fresh.shape).copy_(fresh)


LAYER_NORM_KERNELS = (Kernel(LAYER_NORM, layer_norm), Kernel(LAYER_NORM_GRADIENT, layer_norm_gradient))
