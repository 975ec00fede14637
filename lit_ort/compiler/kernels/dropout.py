"""Dropout by torch: masks that are independent of each other, from the generator that sessions draw from.

ONNX Runtime seeds the masks of a run with consecutive numbers, and its generator is a linear congruential one: the same
place of two masks then differs by a constant that never changes (correlations of 0.58 between layers, measured).
"""

from __future__ import annotations

import functools

import torch

from lit_ort.compiler.kernels.bf16 import ROUNDED
from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.random import current_generator

DROPOUT, DROPOUT_GRADIENT = "dropout", "dropout_gradient"
# Masks come from numbers of 16 bits.
LEVELS = 2**16
# Where each of the two takes the share of elements to drop.
_RATIOS = {DROPOUT: 1, DROPOUT_GRADIENT: 2}
RATIO_POSITIONS = {name + end: position for name, position in _RATIOS.items() for end in ("", ROUNDED)}


def dropout(
    pool: BufferPool, data: torch.Tensor, ratio: torch.Tensor, result: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sets elements to zero with probability `ratio` and scales the others so that the mean stays.

    Args:
        data: float32[...] or bfloat16[...]. ratio: float32[], from 0 to 1.
        result: the type of the result.

    Returns:
        the result, and the mask: uint8[...], 1 where an element was kept.
    """
    share = float(ratio)
    mask = pool.empty(*data.shape, dtype=torch.uint8)
    draw_mask(pool, mask.view(-1).view(torch.bool), share, current_generator())
    return _masked(pool, data, mask, share, result), mask


def dropout_gradient(
    pool: BufferPool,
    gradient: torch.Tensor,
    mask: torch.Tensor,
    ratio: torch.Tensor,
    result: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The gradient of dropout's data, in the type `result`, from that of its result, its mask and its ratio."""
    return _masked(pool, gradient, mask, float(ratio), result)


def draw_mask(pool: BufferPool, mask: torch.Tensor, share: float, generator: torch.Generator | None) -> None:
    """Fills `mask`, bool[n], with false at random, with probability `share` rounded to `LEVELS`.

    One draw of 64 bits serves four elements, which takes a sixth of the time of as many Bernoulli draws.
    """
    drawn = pool.empty(-(-mask.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    dropped = _dropped_levels(share)
    if dropped == LEVELS:
        mask.zero_()
    else:
        torch.ge(drawn.view(torch.int16)[: mask.numel()], dropped - LEVELS // 2, out=mask)


def scale_of(share: float) -> float:
    """What the kept elements are multiplied with, so that the expected result is the data."""
    kept = LEVELS - _dropped_levels(share)
    return LEVELS / kept if kept else 1.0


def _dropped_levels(share: float) -> int:
    return round(share * LEVELS)


def _masked(
    pool: BufferPool, data: torch.Tensor, mask: torch.Tensor, share: float, result: torch.dtype
) -> torch.Tensor:
    # A product of two types would make this copy itself, in fresh memory.
    factor = pool.empty(*data.shape).copy_(mask)
    kept = torch.mul(data, factor, out=pool.empty(*data.shape, dtype=result))
    scale = scale_of(share)
    return kept if scale == 1.0 else kept.mul_(scale)


DROPOUT_KERNELS = tuple(
    Kernel(name + end, functools.partial(run, result=result))
    for name, run in ((DROPOUT, dropout), (DROPOUT_GRADIENT, dropout_gradient))
    for end, result in (("", torch.float32), (ROUNDED, torch.bfloat16))
)
