"""Clipping by the norm of all gradients where each process has some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision

# Stands before a Precision of either package of Lightning's in the bases of a plugin.
_Base: Any = object


class SharedNormClipping(_Base):
    """A plugin without autocast that clips by the norm over the gradients of all processes of a group.

    Args:
        precision: of the strategy's graphs.
        group: the processes.
        is_part: whether a parameter is this process's alone, as others have the rest of what is sharded. All processes
            have the same of any other parameter.
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
    """Of their gradients' norm, by torch's own norm of each tensor: its rounding is that of a single process."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).double().square()
