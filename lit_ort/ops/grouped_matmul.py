"""Matmuls of groups of rows, each with a matrix of its own, and the gradient of these matrices.

The experts of a mixture compute them: rows are sorted by expert, and the ends of the groups are the results of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from lit_ort.ops.matmul import matmul
from lit_ort.ops.operator import Allocator, Operator, define


def grouped_matmul(
    allocator: Allocator, input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """The rows of each group times its matrix. Rows after the last group are zero.

    Args:
        allocator: allocates the result.
        input: float[rows, inner], the groups one after the other.
        weight: float[groups, inner, columns], or float[groups, columns, inner] if it is transposed.
        ends: int[groups]. Where each group ends among the rows.
        transposed: whether the matrices are stored as their transposes.
    """
    result = allocator.empty(len(input), weight.shape[1 if transposed else 2], dtype=input.dtype)
    covered = 0
    for matrix, (start, end) in zip(weight, _groups(ends, len(input)), strict=True):
        if start < end:
            matmul(input[start:end], matrix.t() if transposed else matrix, result[start:end])
        covered = max(covered, end)
    result[covered:] = 0
    return result


def grouped_matmul_gradient(
    allocator: Allocator, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The transpose of each group's rows times those of the other factor.

    Args:
        allocator: allocates the result, float[groups, rows, columns].
        left: float[all rows, rows]. right: float[all rows, columns].
        ends: int[groups]. Where each group ends among all rows.
    """
    result = allocator.empty(len(ends), left.shape[1], right.shape[1], dtype=left.dtype)
    for out, (start, end) in zip(result, _groups(ends, len(left)), strict=True):
        if start < end:
            matmul(left[start:end].t(), right[start:end], out)
        else:
            out.zero_()
    return result


def _groups(ends: torch.Tensor, rows: int) -> Iterator[tuple[int, int]]:
    """Where each group begins and ends; an end outside the rows counts as the nearest one inside."""
    start = 0
    for end in ends.tolist():
        end = min(max(end, 0), rows)
        yield start, end
        start = end


def _fake(input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, transposed: bool) -> torch.Tensor:
    return input.new_empty(input.shape[0], weight.shape[1 if transposed else 2])


def _fake_gradient(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


_SCHEMA = "grouped_matmul(Tensor input, Tensor weight, Tensor ends, bool transposed) -> Tensor"
_SCHEMA_OF_GRADIENT = "grouped_matmul_gradient(Tensor left, Tensor right, Tensor ends) -> Tensor"
OPERATORS = (
    Operator(define(_SCHEMA, grouped_matmul, _fake), grouped_matmul, recomputable=False),
    Operator(
        define(_SCHEMA_OF_GRADIENT, grouped_matmul_gradient, _fake_gradient),
        grouped_matmul_gradient,
        recomputable=False,
    ),
)


@register_flop_formula(torch.ops.lit_ort.grouped_matmul)
def _operations(input: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """The FLOP of matmuls of all rows, from shapes."""
    return 2 * input[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.lit_ort.grouped_matmul_gradient)
def _operations_of_gradient(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Likewise."""
    return 2 * left[0] * left[1] * right[1]
