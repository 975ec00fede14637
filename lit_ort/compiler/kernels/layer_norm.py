"""Layer normalisation over the last dimension and its gradient by torch, some rows at a time.

torch gives these operators fresh memory: that of a few rows stays in a core's cache until it is copied, and leaves no
large holes among the process's other memory.

Source: Ba, Kiros and Hinton 2016.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool

LAYER_NORM, LAYER_NORM_GRADIENT = "layer_norm", "layer_norm_gradient"

aten = torch.ops.aten
# Elements of the rows that are computed at a time: 512 KB.
CHUNK_ELEMENTS = 2**17


def layer_norm(
    pool: BufferPool, x: torch.Tensor, scale: torch.Tensor, epsilon: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x - mean) / sqrt(variance + epsilon) scale + bias.

    Args:
        x: float32[..., width]. scale, bias: float32[width]. epsilon: float32[].

    Returns:
        float32[..., width], the mean and one over the standard deviation of each row, float32[..., 1].
    """
    rows = x.reshape(-1, len(scale))
    result, mean, inverse = pool.empty(*rows.shape), torch.empty(len(rows), 1), torch.empty(len(rows), 1)
    for chunk in _chunks(rows):
        parts = aten.native_layer_norm(rows[chunk], scale.shape, scale, bias, float(epsilon))
        for whole, part in zip((result, mean, inverse), parts, strict=True):
            whole[chunk] = part
    of_rows = (*x.shape[:-1], 1)
    return result.view(x.shape), mean.view(of_rows), inverse.view(of_rows)


def layer_norm_gradient(
    pool: BufferPool,
    gradient: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, scale and bias, from that of the result, what `layer_norm` was given and what it found."""
    width = len(scale)
    given, rows = gradient.reshape(-1, width), x.reshape(-1, width)
    means, inverses = mean.reshape(-1, 1), inverse.reshape(-1, 1)
    result, of_scale, of_bias = pool.empty(*rows.shape), torch.zeros(width), torch.zeros(width)
    for chunk in _chunks(rows):
        of_rows, of_scale_here, of_bias_here = aten.native_layer_norm_backward(
            given[chunk], rows[chunk], scale.shape, means[chunk], inverses[chunk], scale, scale, (True, True, True)
        )
        result[chunk] = of_rows
        of_scale += of_scale_here
        of_bias += of_bias_here
    return result.view(x.shape), of_scale, of_bias


def _chunks(rows: torch.Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // rows.shape[1])
    return (slice(start, start + size) for start in range(0, len(rows), size))


LAYER_NORM_KERNELS = (Kernel(LAYER_NORM, layer_norm), Kernel(LAYER_NORM_GRADIENT, layer_norm_gradient))
