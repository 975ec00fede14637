"""A value that can't be read before another one is there."""

from __future__ import annotations

import torch

from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool

AFTER, COPY_AFTER = "after", "copy_after"


def after(pool: BufferPool, value: torch.Tensor, awaited: torch.Tensor) -> torch.Tensor:
    """`value` itself, for readers that don't compute in place: ONNX Runtime takes its memory for that of a result."""
    return value


def copy_after(pool: BufferPool, value: torch.Tensor, awaited: torch.Tensor) -> torch.Tensor:
    """A copy of `value`, for any reader."""
    return pool.empty(*value.shape, dtype=value.dtype).copy_(value)


ORDERING_KERNELS = (Kernel(AFTER, after), Kernel(COPY_AFTER, copy_after))
