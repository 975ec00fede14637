"""A gradient that the optimizer may take as soon as it is there.

Outside of a run with an optimizer the gradient is handed on; a strategy binds the operator to the optimizer of a step.

Source: Lv et al. 2023, LOMO, and PyTorch's tutorial on the optimizer step in the backward.
"""

from __future__ import annotations

import torch

from lit_ort.ops.operator import Memory, define


def _kernel(memory: Memory, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return gradient.clone()


def _fake(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


hand_over = define("hand_over(Tensor gradient, Tensor parameter) -> Tensor", _kernel, _fake)
