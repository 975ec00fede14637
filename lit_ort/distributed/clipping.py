"""Clipping by the norm of all gradients where each process has some of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lit_ort.precision import ORTPrecision


class SharedNormPrecision(ORTPrecision):
    """As `ORTPrecision`; clips by the norm over the gradients of all processes of a group, which share no parameter."""

    def __init__(self, precision: Any, group: dist.ProcessGroup) -> None:
        super().__init__(precision)
        self._group = group

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        gradients = [p.grad for p in self.main_params(optimizer) if p.grad is not None]
        squares = [gradient.double().square().sum() for gradient in gradients]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        # As torch.nn.utils.clip_grad_norm_ has it.
        factor = (clip_val / (total.sqrt() + 1e-6)).clamp(max=1.0).float()
        for gradient in gradients:
            gradient.mul_(factor)
