"""Private interfaces of torch's optimizers and parameters: their hooks, and the record of an optimizer step."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

import torch
from torch.optim import Optimizer


def sync_groups(sharded: Any, local: Any) -> None:
    """Gives a ZeroRedundancyOptimizer's optimizer the settings of its parameter groups."""
    sharded._sync_param_groups(sharded.param_groups, local.param_groups)


def note_step(optimizer: Optimizer) -> None:
    """Records an optimizer step that did not call `step`, so that learning rate schedules don't warn."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue] - not declared


def take_no_loss_scale(optimizer: Optimizer) -> None:
    """Makes a GradScaler unscale the gradients of a fused optimizer before its step, as for other optimizers."""
    optimizer._step_supports_amp_scaling = False  # pyright: ignore[reportAttributeAccessIssue] - not declared


def has_step_hooks(optimizer: Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def forget_step_hooks(optimizer: Optimizer) -> None:
    """Gives a copy of an optimizer no hooks of steps; those of the original stay."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a hook on its gradient, before or after it is accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_step_of(optimizer: Optimizer, kind: type[Any]) -> bool:
    """Whether an optimizer's step is that of a class, besides wrappers by torch and by learning rate schedulers."""
    step = inspect.unwrap(optimizer.step, stop=_is_of_dynamo)
    own, other = type(optimizer)._init_group, kind._init_group  # pyright: ignore[reportAttributeAccessIssue]
    return step is inspect.unwrap(kind.step) and inspect.unwrap(own) is inspect.unwrap(other)


def _is_of_dynamo(function: Any) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable")
