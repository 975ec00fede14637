"""lit_ort's operators, and kernels for some of torch's operators.

The import registers `torch.ops.lit_ort`, and shapes of torch's operators that torch lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lit_ort._compat.sampling_shapes import add_sampling_shapes
from lit_ort._compat.torch_ops import OpOverload
from lit_ort.ops import (
    attention,
    bfloat16_cross_entropy,
    bfloat16_matmul,
    casts,
    convolution,
    ctc_loss,
    dropout,
    embedding,
    grouped_matmul,
    image_convolution,
    linear_cross_entropy,
    matrix,
    memory_format,
    recurrent,
    slices,
    writes,
    zeros,
)
from lit_ort.ops.operator import Allocator, Operator, TorchAllocator, cast

_ALL: tuple[Operator, ...] = (
    *attention.OPERATORS,
    *bfloat16_cross_entropy.OPERATORS,
    *bfloat16_matmul.OPERATORS,
    *casts.OPERATORS,
    *convolution.OPERATORS,
    *ctc_loss.OPERATORS,
    *dropout.OPERATORS,
    *embedding.OPERATORS,
    *grouped_matmul.OPERATORS,
    *image_convolution.OPERATORS,
    *linear_cross_entropy.OPERATORS,
    *matrix.OPERATORS,
    *memory_format.OPERATORS,
    *recurrent.OPERATORS,
    *slices.OPERATORS,
    *writes.OPERATORS,
    *zeros.OPERATORS,
)
add_sampling_shapes()
OPERATORS: Mapping[OpOverload, Operator] = MappingProxyType({op.target: op for op in _ALL})


def operator_of(target: object) -> Operator | None:
    """The lit_ort operator that a node calls, or None."""
    return OPERATORS.get(target) if isinstance(target, OpOverload) else None


__all__ = ["OPERATORS", "Allocator", "Operator", "TorchAllocator", "cast", "operator_of"]
