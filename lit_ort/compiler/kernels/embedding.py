"""Gradient of an embedding table by torch, into memory that is kept."""

from __future__ import annotations

import torch

from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool

NAME = "embedding_gradient"


def embedding_gradient(
    pool: BufferPool, shape: torch.Tensor, indices: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Adds each row of the gradient to the row of the table that was read.

    Args:
        shape: int64[2], rows and width of the table.
        indices: int64[...], each within the table, or negative from its end.
        gradient: float32[..., width].

    Returns:
        float32[rows, width].
    """
    rows, width = shape.tolist()
    flat = indices.flatten()
    table = pool.empty(rows, width).zero_()
    return table.index_add_(0, torch.where(flat < 0, flat + rows, flat), gradient.reshape(-1, width))


EMBEDDING_KERNELS = (Kernel(NAME, embedding_gradient),)
