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
        parameters = list(self.main_params(optimizer))
        # By torch's own norm of each tensor: its rounding is that of a single process.
        own = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        square = own.double().square()
        dist.all_reduce(square, group=self._group)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, square.sqrt().float())
