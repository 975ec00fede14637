"""Torch's fused form of an optimizer's step on the CPU, where the default form loops over the parameters.

A group of parameters whose user has named no form is marked as fused only while it is updated, so that its options,
its state and checkpoints stay those of the default form. Each step decides anew, by what torch's kernels don't check:
they read a parameter, its gradient and its state in the order of their memory, even where these orders differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lit_ort._compat.torch_optim import has_step_of

_KINDS = (Adam, AdamW, SGD, Adagrad)
# In lower precision the forms round differently, and updates by a fused SGD are lost (torch 2.13).
_DTYPES = ({torch.float32}, {torch.float64})
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
# A fused kernel wakes torch's threads once a parameter, of any size. Up to so many elements a parameter, one thread is
# faster (400 parameters of 136 elements, Intel Xeon: 2.0 ms for 2.5), and on busy cores a wake can take milliseconds.
_ELEMENTS_OF_ONE_THREAD = 4096


@contextmanager
def fused_form(optimizer: Any) -> Iterator[None]:
    """A context in which an optimizer's steps use the fused form, in groups where it computes the same.

    Args:
        optimizer: any optimizer. Those without a fused form, or with a step of their own, stay as they are.
    """
    kind = next((kind for kind in type(optimizer).__mro__ if kind in _KINDS), None)
    if kind is None or not has_step_of(optimizer, kind):
        yield
        return
    # The groups, and their parameters with gradients.
    marked: list[tuple[dict[str, Any], list[Tensor]]] = []
    threads = torch.get_num_threads()

    def mark() -> None:
        groups = ((group, _with_gradients(group)) for group in optimizer.param_groups)
        marked.extend((group, own) for group, own in groups if _is_fusible(group, own, optimizer.state))
        for group, _ in marked:
            group["fused"] = True
        if threads > 1 and _are_small([parameter for _, own in marked for parameter in own]):
            torch.set_num_threads(1)

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        return mark() if closure is None else (args[:1], {**kwargs, "closure": partial(_called_before, mark, closure)})

    def unmark(*_: Any) -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for group, own in marked:
            group["fused"] = None
            # The default form does this, the fused one doesn't: a later backward would take the changed weights.
            torch.autograd.graph.increment_version(own)
        marked.clear()

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(unmark)
    try:
        yield
    finally:
        unmark()
        for handle in handles:
            handle.remove()


def _called_before(action: Callable[[], None], closure: Callable[[], Any]) -> Any:
    """Calls a closure, which computes gradients, and then the action that needs them."""
    result = closure()
    action()
    return result


def _with_gradients(group: Mapping[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _are_small(parameters: list[Tensor]) -> bool:
    return 0 < sum(map(Tensor.numel, parameters)) <= _ELEMENTS_OF_ONE_THREAD * len(parameters)


def _is_fusible(group: Mapping[str, Any], parameters: list[Tensor], states: Mapping[Tensor, Any]) -> bool:
    """Whether a group has torch's default form, and the fused form updates it in the same way."""
    if group["fused"] is not None or group["foreach"] is not None:
        return False
    if group["differentiable"] or group.get("capturable", False):
        return False
    if group.get("momentum") == 0 and group["weight_decay"] == 0:
        # Plain SGD's default form calls one operator for a parameter.
        return False
    # The fused form counts both steps of a parameter that is there twice before it takes the first one.
    if len(set(map(id, parameters))) < len(parameters):
        return False
    # Sparse gradients are not contiguous.
    gradients = [parameter.grad for parameter in parameters]
    values = _state_values(group, states, parameters)
    tensors: list[Any] = [*parameters, *gradients, *values]
    return (
        set(map(type, tensors)) <= {Tensor, Parameter}
        and all(parameter.is_cpu for parameter in parameters)
        and {tensor.dtype for tensor in tensors} in _DTYPES
        and (
            all(map(Tensor.is_contiguous, tensors))
            or all(_share_a_format(p, p.grad, *_state_values(group, states, [p])) for p in parameters)
        )
    )


def _state_values(group: Mapping[str, Any], states: Mapping[Tensor, Any], parameters: list[Tensor]) -> list[Any]:
    """The state of parameters besides their step counts; None for a state that their next step creates.

    The default form has to create it, as the fused SGD can't do that for some parameters of a group only.
    """
    if group.get("momentum") == 0:
        return []
    own = (states.get(parameter) or {"": None} for parameter in parameters)
    return [value for state in own for name, value in state.items() if name != "step"]


def _share_a_format(*tensors: Any) -> bool:
    """Whether the elements of tensors have the same order in memory, without gaps."""
    return any(all(t.is_contiguous(memory_format=memory_format) for t in tensors) for memory_format in _FORMATS)
