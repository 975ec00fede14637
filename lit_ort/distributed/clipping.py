"""Gradient clipping by the total norm if each process has a part of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision

# A mixin for the Precision classes of both Lightning packages.
_Base: Any = object


class SharedNormClipping(_Base):
    """A plugin without autocast that clips by the norm over the gradients of all processes of a group.

    Args:
        precision: the precision of the strategy's graphs.
        group: the process group.
        is_part: whether a parameter is a shard that only this process has. All other parameters are replicated on all
            processes.
    """

    def __init__(
        self, precision: Any, group: dist.ProcessGroup, is_part: Callable[[torch.Tensor], bool] = lambda _: True
    ) -> None:
        self.precision = precision
        self._group = group
        self._is_part = is_part

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        parameters = list(self.main_params(optimizer))
        square = _square([parameter for parameter in parameters if self._is_part(parameter)])
        dist.all_reduce(square, group=self._group)
        square += _square([parameter for parameter in parameters if not self._is_part(parameter)])
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, square.sqrt().float())


class SharedNormPrecision(SharedNormClipping, Precision):
    """For modules of `lightning.pytorch`."""


def _square(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The squared norm of their gradients, from torch's norm of each tensor, so that rounding is as in one process."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).double().square()
