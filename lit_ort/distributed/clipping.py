"""Gradient clipping by the total norm if each process has a part of the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def with_shared_norm(
    plugin: Any, group: dist.ProcessGroup, is_part: Callable[[torch.Tensor], bool] = lambda _: True
) -> Any:
    """A precision plugin of Lightning's that clips by the norm over the gradients of all processes of a group.

    Args:
        plugin: the plugin, of either of Lightning's packages; a copy of it is returned.
        group: the process group.
        is_part: whether a parameter is a shard that only this process has. All other parameters are replicated on all
            processes.
    """

    def clip_grad_by_norm(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        parameters = list(plugin.main_params(optimizer))
        square = _square([parameter for parameter in parameters if is_part(parameter)])
        dist.all_reduce(square, group=group)
        square += _square([parameter for parameter in parameters if not is_part(parameter)])
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, square.sqrt().float())

    clipping = copy.copy(plugin)
    clipping.clip_grad_by_norm = clip_grad_by_norm
    return clipping


def _square(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The squared norm of their gradients, from torch's norm of each tensor, so that rounding is as in one process."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).double().square()
