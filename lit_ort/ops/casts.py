"""Changes of type into memory that is kept."""

from __future__ import annotations

from typing import Any

import torch

from lit_ort.ops.operator import Memory, Operator

aten = torch.ops.aten


def _kernel(memory: Memory, x: torch.Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    if not x.is_contiguous():
        # In the order of memory of what is given, which torch keeps.
        return aten._to_copy.default(x, dtype=dtype, **kwargs)
    return memory.empty(*x.shape, dtype=dtype or x.dtype).copy_(x)


OPERATORS = (Operator(aten._to_copy.default, _kernel),)
