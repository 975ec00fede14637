"""Whether the optimizer of a Trainer can step inside a run, and the Trainer's gradient clipping."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch.optim import Optimizer

from lit_ort._compat.lightning import is_from_lightning, own_class_of
from lit_ort._compat.torch_optim import has_gradient_hooks, has_step_hooks
from lit_ort.backend.explanation import CompileLog
from lit_ort.runtime.parameter_updates import Clipping, is_by_parameter

# Hooks in which user code can read gradients or change the optimizer's step.
_MODULE_HOOKS = (
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "backward",
    "optimizer_step",
)
# Names of torch's attribute and of Lightning's function.
_GRADIENTS = ("grad", "grad_norm")
# Skips the backward, but not the optimizer's step, in its last epoch.
_AVERAGING = "StochasticWeightAveraging"
_CALLBACK_HOOKS = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")


def clipping_of(trainer: Any) -> Clipping:
    by_value = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value"
    return Clipping(trainer.gradient_clip_val or 0.0, by_value)


def reason_against_updates(module: Any, trainer: Any, optimizer: Optimizer, compile_log: CompileLog) -> str | None:
    """Why an optimizer has to step after the backward, or None."""
    if not module.automatic_optimization:
        return "the module uses manual optimization"
    if trainer.accumulate_grad_batches != 1:
        return f"accumulate_grad_batches is {trainer.accumulate_grad_batches}"
    if not is_by_parameter(optimizer):
        return f"the step of {type(optimizer).__name__} can need all gradients, the loss or another backward"
    if has_step_hooks(optimizer):
        return f"{type(optimizer).__name__} has hooks on its step"
    if compile_log.may_read_gradients("training_step"):
        return f"{type(module).__name__}.training_step, or code that it calls outside of graphs, may read gradients"
    averaging = next((c for c in trainer.callbacks if own_class_of(c).__name__ == _AVERAGING), None)
    if averaging is not None:
        return f"{type(averaging).__name__} steps with the gradients of an earlier epoch"
    overridden = next(_overridden(module, trainer), None)
    if overridden is not None:
        return f"{overridden} may read gradients"
    reader = next(filter(None, (_reader(type(owner)) for owner in (module, *trainer.callbacks))), None)
    if reader is not None:
        return f"{reader} may read gradients"
    if any(has_gradient_hooks(parameter) for parameter in module.parameters()):
        return "a parameter has a hook on its gradient"
    return None


def _overridden(module: Any, trainer: Any) -> Iterator[str]:
    for owner, hooks in ((module, _MODULE_HOOKS), *((callback, _CALLBACK_HOOKS) for callback in trainer.callbacks)):
        for hook in hooks:
            if not is_from_lightning(getattr(owner, hook)):
                yield f"{type(owner).__name__}.{hook}"


@functools.cache
def _reader(kind: type) -> str | None:
    """A method of a module's or callback's class that names gradients, also in functions of a user's that it calls."""
    for base in filter(_is_of_user, kind.__mro__):
        for name, function in vars(base).items():
            if callable(function) and _names_gradients(inspect.unwrap(function), set()):
                return f"{base.__name__}.{name}"
    return None


def _names_gradients(function: Any, seen: set[CodeType]) -> bool:
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None or code in seen or not _is_of_user(function):
        return False
    seen.add(code)
    names = _names(code)
    called = (function.__globals__.get(name) for name in names)
    return not names.isdisjoint(_GRADIENTS) or any(_names_gradients(value, seen) for value in called if callable(value))


def _names(code: CodeType) -> set[str]:
    """The attributes and globals that a function's code names, with those of the functions that it defines."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _is_of_user(value: Any) -> bool:
    return not is_from_lightning(value) and value.__module__.partition(".")[0] not in ("torch", "builtins")
