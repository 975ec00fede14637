"""Output layer and cross entropy of bfloat16 factors, whose gradients are float32: what reads one rounds it, if at all.

Native sessions compute it in machine code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lit_ort.ops.linear_cross_entropy import Results, fake_results, linear_cross_entropy
from lit_ort.ops.operator import Allocator, Operator, cast, define


def bfloat16_cross_entropy(allocator: Allocator, *arguments: Any) -> Results:
    """Computes the loss and its gradients, as `linear_cross_entropy` does under autocast, all in float32.

    Args:
        allocator: allocates the gradients and the workspace.
        arguments: those of `linear_cross_entropy` but `low_precision`: hidden and weight are bfloat16, bias and
            class_weight float32.

    Raises:
        IndexError: a label is not in 0..C-1 and is not ignored.
    """
    results = linear_cross_entropy(allocator, *_under_autocast(arguments))
    loss, first, second, third = (cast(allocator, result, torch.float32) for result in results)
    return loss, first, second, third


def _fake(*arguments: Any) -> Results:
    loss, first, second, third = (result.float() for result in fake_results(*_under_autocast(arguments)))
    return loss, first, second, third


def _under_autocast(arguments: Sequence[Any]) -> list[Any]:
    """The arguments of `linear_cross_entropy`, with `low_precision`."""
    *inputs, wanted = arguments
    return [*inputs, True, wanted]


_ARGUMENTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight"
_SCHEMA = (
    f"bfloat16_cross_entropy({_ARGUMENTS}, int ignore_index, bool mean, bool[] wanted) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
OPERATORS = (Operator(define(_SCHEMA, bfloat16_cross_entropy, _fake), bfloat16_cross_entropy, recomputable=False),)
