"""GELU and its gradient by torch, exact or with tanh, into given memory.

torch lays the result out as its arguments; those of permuted ones, which are rare, keep torch's own memory.

Source: Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

import torch

from lit_ort.ops.operator import Memory, Operator

aten = torch.ops.aten


def gelu(memory: Memory, self: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """x P(N < x) of a normally distributed N. self: float[...]; returns float[...]."""
    if not self.is_contiguous():
        return aten.gelu.default(self, approximate=approximate)
    return aten.gelu.out(self, approximate=approximate, out=memory.empty(*self.shape, dtype=self.dtype))


def gelu_backward(
    memory: Memory, grad_output: torch.Tensor, self: torch.Tensor, *, approximate: str = "none"
) -> torch.Tensor:
    """The gradient of gelu's argument, float[...], from that of its result."""
    if not (self.is_contiguous() and grad_output.is_contiguous() and self.dtype == grad_output.dtype):
        return aten.gelu_backward.default(grad_output, self, approximate=approximate)
    into = memory.empty(*self.shape, dtype=self.dtype)
    return aten.gelu_backward.grad_input(grad_output, self, approximate=approximate, grad_input=into)


OPERATORS = (Operator(aten.gelu.default, gelu), Operator(aten.gelu_backward.default, gelu_backward))
