"""An operator that passes a gradient to the optimizer as soon as it is computed.

A strategy binds the operator to the optimizer of a step. Without an optimizer, the operator returns the gradient.

Source: Lv et al. 2023, LOMO, and PyTorch's tutorial on the optimizer step in the backward.
"""

from __future__ import annotations

import torch

from lit_ort.ops.operator import Allocator, define


def _kernel(allocator: Allocator, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return gradient.clone()


def _fake(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


hand_over = define("hand_over(Tensor gradient, Tensor parameter) -> Tensor", _kernel, _fake)
