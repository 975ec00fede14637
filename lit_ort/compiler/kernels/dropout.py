"""Dropout by torch: masks that are independent of each other, from the generator that sessions draw from.

ONNX Runtime seeds the masks of a run with consecutive numbers, and its generator is a linear congruential one: the same
place of two masks then differs by a constant that never changes (correlations of 0.58 between layers, measured).
"""

from __future__ import annotations

import functools

import torch

from lit_ort.compiler.kernels.bf16 import ROUNDED
from lit_ort.compiler.kernels.masks import LEVELS, SEEDS, Draws, scale_of, smallest_kept
from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.random import draw_seed

DROPOUT, DROPOUT_GRADIENT = "dropout", "dropout_gradient"
# Where each of the two takes the share of elements to drop.
_RATIOS = {DROPOUT: 1, DROPOUT_GRADIENT: 2}
RATIO_POSITIONS = {name + end: position for name, position in _RATIOS.items() for end in ("", ROUNDED)}
# Elements whose mask is drawn at a time: their numbers are 1 MB.
CHUNK_ELEMENTS = 2**19


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
    draw_mask(mask.view(-1), share, draw_seed(SEEDS))
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


def draw_mask(mask: torch.Tensor, share: float, seed: int) -> None:
    """Fills `mask`, uint8[n], with 0 at random with probability `share`, and with 1 elsewhere."""
    smallest = smallest_kept(share)
    if smallest >= LEVELS // 2:
        mask.zero_()
        return
    draws = Draws(seed)
    for part in mask.split(CHUNK_ELEMENTS):
        torch.ge(draws.take(len(part)), smallest, out=part)


def _masked(
    pool: BufferPool, data: torch.Tensor, mask: torch.Tensor, share: float, result: torch.dtype
) -> torch.Tensor:
    # A product of two types would make this copy itself, in fresh memory.
    kept = pool.empty(*data.shape, dtype=data.dtype).copy_(mask).mul_(data)
    scale = scale_of(share)
    return pool.cast(kept if scale == 1.0 else kept.mul_(scale), result)


DROPOUT_KERNELS = tuple(
    Kernel(name + end, functools.partial(run, result=result))
    for name, run in ((DROPOUT, dropout), (DROPOUT_GRADIENT, dropout_gradient))
    for end, result in (("", torch.float32), (ROUNDED, torch.bfloat16))
)
