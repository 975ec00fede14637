"""Whether the optimizer of a Trainer can step inside a run, and the Trainer's gradient clipping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from lit_ort._compat.lightning import is_from_lightning
from lit_ort._compat.torch_optim import has_gradient_hooks, has_step_hooks
from lit_ort.runtime.updates import Clipping, is_by_parameter

# Hooks in which user code can read gradients or change the optimizer's step.
_MODULE_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "backward",
    "optimizer_step",
)
_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step")


def clipping_of(trainer: Any) -> Clipping:
    by_value = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value"
    return Clipping(trainer.gradient_clip_val or 0.0, by_value)


def reason_against_updates(module: Any, trainer: Any, optimizer: Optimizer) -> str | None:
    """Why an optimizer has to step after the backward, or None."""
    if not module.automatic_optimization:
        return "the module uses manual optimization"
    if trainer.accumulate_grad_batches != 1:
        return f"accumulate_grad_batches is {trainer.accumulate_grad_batches}"
    if not is_by_parameter(optimizer):
        return f"the step of {type(optimizer).__name__} can need all gradients, the loss or another backward"
    if has_step_hooks(optimizer):
        return f"{type(optimizer).__name__} has hooks on its step"
    overridden = next(_overridden(module, trainer), None)
    if overridden is not None:
        return f"{overridden} may read gradients"
    if any(has_gradient_hooks(parameter) for parameter in module.parameters()):
        return "a parameter has a hook on its gradient"
    return None


def _overridden(module: Any, trainer: Any) -> Iterator[str]:
    for owner, hooks in ((module, _MODULE_HOOKS), *((callback, _CALLBACK_HOOKS) for callback in trainer.callbacks)):
        for hook in hooks:
            if not is_from_lightning(getattr(owner, hook)):
                yield f"{type(owner).__name__}.{hook}"
