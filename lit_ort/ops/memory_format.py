"""An operator that converts a value to channels last or to contiguous memory."""

from __future__ import annotations

import torch

from lit_ort.ops.operator import Allocator, Operator, define


def in_memory_format(allocator: Allocator, x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Converts a tensor to `torch.channels_last` or `torch.contiguous_format`; returns x itself if it has this format.

    Args:
        allocator: allocates the result.
        x: float[batch, channels, height, width] for channels last, otherwise float[...].
        channels_last: the format.
    """
    memory_format = _format(channels_last)
    if x.is_contiguous(memory_format=memory_format):
        return x
    if not channels_last:
        return allocator.empty(*x.shape, dtype=x.dtype).copy_(x)
    batch, channels, height, width = x.shape
    return allocator.empty(batch, height, width, channels, dtype=x.dtype).permute(0, 3, 1, 2).copy_(x)


def _format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format


def _copy(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=_format(channels_last)).copy_(x)


def _fake(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=_format(channels_last))


_OPERATOR = define("in_memory_format(Tensor x, bool channels_last) -> Tensor", in_memory_format, _fake, eager=_copy)

OPERATORS = (Operator(_OPERATOR, in_memory_format),)
