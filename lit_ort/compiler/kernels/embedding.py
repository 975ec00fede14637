"""Gradient of an embedding table by torch, into memory that is kept."""

from __future__ import annotations

import torch

from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool

NAME = "embedding_gradient"
ONTO = "embedding_gradient_onto"


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
    return embedding_gradient_onto(pool, pool.empty(*shape.tolist()).zero_(), indices, gradient)


def embedding_gradient_onto(
    pool: BufferPool, table: torch.Tensor, indices: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Adds each row of the gradient to the row of a table that holds another gradient already, in place.

    Args:
        table: float32[rows, width].
        indices: int64[...], each within the table, or negative from its end.
        gradient: float32[..., width].

    Returns:
        the table.
    """
    rows, width = table.shape
    flat = indices.flatten()
    return table.index_add_(0, torch.where(flat < 0, flat + rows, flat), gradient.reshape(-1, width))


EMBEDDING_KERNELS = (Kernel(NAME, embedding_gradient), Kernel(ONTO, embedding_gradient_onto))
