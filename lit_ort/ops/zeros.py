"""Zeros that have memory.

torch writes a derivative that is zero everywhere as a tensor without memory, which only its own operators understand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lit_ort.ops.operator import Memory, Operator


def zeros(memory: Memory, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """Zeros of a shape, float32 by default."""
    return memory.empty(*size, dtype=dtype or torch.float32).zero_()


OPERATORS = (Operator(torch.ops.aten._efficientzerotensor.default, zeros),)
