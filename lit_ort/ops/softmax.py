"""Softmax, its logarithm and their gradients by torch, into given memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lit_ort._compat.torch_ops import OpOverload
from lit_ort.ops.operator import Memory, Operator

aten = torch.ops.aten


def _forward(target: OpOverload, out_overload: OpOverload) -> Operator:
    def kernel(memory: Memory, self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        """self: float[...]; returns float[...], float32 with `half_to_float`, which CPUs don't have."""
        into = memory.empty(*self.shape, dtype=torch.float32 if half_to_float else self.dtype)
        return out_overload(self, dim, half_to_float, out=into)

    return Operator(target, kernel)


def _backward(target: OpOverload, into_grad: Callable[..., torch.Tensor]) -> Operator:
    def kernel(
        memory: Memory, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
    ) -> torch.Tensor:
        """grad_output, output: float[...]; returns float[...] in `input_dtype`."""
        into = memory.empty(*output.shape, dtype=input_dtype)
        return into_grad(grad_output, output, dim, input_dtype, into)

    return Operator(target, kernel)


def _softmax_gradient(
    grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype, into: torch.Tensor
) -> torch.Tensor:
    return aten._softmax_backward_data.out(grad, output, dim, dtype, grad_input=into)


def _log_softmax_gradient(
    grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype, into: torch.Tensor
) -> torch.Tensor:
    return aten._log_softmax_backward_data.out(grad, output, dim, dtype, out=into)


OPERATORS = (
    _forward(aten._softmax.default, aten._softmax.out),
    _forward(aten._log_softmax.default, aten._log_softmax.out),
    _backward(aten._softmax_backward_data.default, _softmax_gradient),
    _backward(aten._log_softmax_backward_data.default, _log_softmax_gradient),
)
