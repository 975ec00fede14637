"""Output layer and cross entropy of bfloat16 factors, whose gradients are float32: what reads one rounds it, if at all.

Native sessions compute it in machine code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lit_ort.ops.linear_cross_entropy import Results, linear_cross_entropy
from lit_ort.ops.operator import Allocator, Operator, cast, define


def bfloat16_cross_entropy(
    allocator: Allocator,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    mean: bool,
    wanted: Sequence[bool],
) -> Results:
    """Computes cross_entropy(hidden @ weight.T + bias, labels) and its gradients.

    Args:
        allocator: allocates the gradients and the workspace.
        hidden: bfloat16[N, H]. weight: bfloat16[C, H]. bias, class_weight: float32[C]. labels: int64[N].
        ignore_index, mean, wanted: as of `linear_cross_entropy`.

    Returns:
        The loss, float32[]; and the gradients of hidden, weight and bias in float32. Gradients that are not computed
        are empty tensors.

    Raises:
        IndexError: a label is not in 0..C-1 and is not ignored.
    """
    settings = ignore_index, mean, True, wanted
    results = linear_cross_entropy(allocator, hidden, weight, bias, labels, class_weight, *settings)
    loss, first, second, third = (cast(allocator, result, torch.float32) for result in results)
    return loss, first, second, third


def _fake(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    mean: bool,
    wanted: Sequence[bool],
) -> Results:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    first, second, third = (
        hidden.new_empty(shape if is_wanted else (0,), dtype=torch.float32)
        for shape, is_wanted in zip(shapes, wanted, strict=True)
    )
    return hidden.new_empty((), dtype=torch.float32), first, second, third


_ARGUMENTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight"
_SCHEMA = (
    f"bfloat16_cross_entropy({_ARGUMENTS}, int ignore_index, bool mean, bool[] wanted) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
OPERATORS = (Operator(define(_SCHEMA, bfloat16_cross_entropy, _fake), bfloat16_cross_entropy, recomputable=False),)
