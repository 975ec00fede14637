"""Casts into memory that is reused."""

from __future__ import annotations

from typing import Any

import torch

from lit_ort.ops.operator import Allocator, Operator

aten = torch.ops.aten


def _kernel(allocator: Allocator, x: torch.Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    if not x.is_contiguous():
        # Torch's operator keeps the memory format of the input.
        return aten._to_copy.default(x, dtype=dtype, **kwargs)
    return allocator.empty(*x.shape, dtype=dtype or x.dtype).copy_(x)


OPERATORS = (Operator(aten._to_copy.default, _kernel),)
