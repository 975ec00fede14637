"""Dropout by torch: masks that are independent of each other, from the generator that sessions draw from.

ONNX Runtime seeds the masks of a run with consecutive numbers, and its generator is a linear congruential one: the same
place of two masks then differs by a constant that never changes (correlations of 0.58 between layers, measured).
"""

from __future__ import annotations

import torch

from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.random import current_generator

DROPOUT, DROPOUT_GRADIENT = "dropout", "dropout_gradient"
# Where each of the two takes the share of elements to drop.
RATIO_POSITIONS = {DROPOUT: 1, DROPOUT_GRADIENT: 2}


def dropout(pool: BufferPool, data: torch.Tensor, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sets elements to zero with probability `ratio` and scales the others by 1 / (1 - ratio).

    Args:
        data: float32[...]. ratio: float32[], from 0 to 1.

    Returns:
        the result, and the mask: uint8[...], 1 where an element was kept.
    """
    share = float(ratio)
    mask = torch.empty(data.shape, dtype=torch.uint8).bernoulli_(1 - share, generator=current_generator())
    return _masked(pool, data, mask, share), mask


def dropout_gradient(pool: BufferPool, gradient: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """The gradient of dropout's data, float32[...], from that of its result, its mask and its ratio."""
    return _masked(pool, gradient, mask, float(ratio))


def _masked(pool: BufferPool, data: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    kept = torch.mul(data, mask, out=pool.empty(*data.shape))
    return kept.mul_(1 / (1 - share)) if 0 < share < 1 else kept


DROPOUT_KERNELS = (Kernel(DROPOUT, dropout), Kernel(DROPOUT_GRADIENT, dropout_gradient))
