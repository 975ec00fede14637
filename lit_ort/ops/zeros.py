"""Zeros that have memory.

Torch represents a gradient that is zero everywhere by a tensor without memory, which only its own operators support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lit_ort.ops.operator import Allocator, Operator


def zeros(allocator: Allocator, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """A tensor of zeros, float32 by default."""
    return allocator.empty(*size, dtype=dtype or torch.float32).zero_()


OPERATORS = (Operator(torch.ops.aten._efficientzerotensor.default, zeros),)
