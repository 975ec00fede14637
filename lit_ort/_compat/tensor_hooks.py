"""Replaces the methods of tensors that ask autograd for the gradient of a value: `register_hook` and `retain_grad`."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

# Fabric's hooks on results check how a backward was called, and read no gradients.
_CHECKS = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


class Taker(Protocol):
    """What takes the hooks of one tensor.

    Attributes:
        hooks: the hooks by the id of their handle.
        retains: whether the tensor's gradient is kept.
    """

    hooks: OrderedDict[int, Callable[[torch.Tensor], Any]]
    retains: bool


def take_hooks(taker_of: Callable[[torch.Tensor], Taker | None]) -> None:
    """Hands hooks on tensors over, for the rest of the process.

    Args:
        taker_of: what takes those of a tensor with a `grad_fn`, or None, which leaves them to autograd.
    """
    own_register: Any = torch.Tensor.register_hook
    own_retain: Any = torch.Tensor.retain_grad

    def taker(tensor: torch.Tensor) -> Taker | None:
        is_plain = type(tensor) is torch.Tensor and tensor.grad_fn is not None
        return taker_of(tensor) if is_plain else None

    @functools.wraps(own_register)
    def register_hook(self: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        # A partial function in Lightning 2.6.
        is_check = getattr(getattr(hook, "func", hook), "__module__", None) in _CHECKS
        found = None if is_check else taker(self)
        if found is None:
            return own_register(self, hook)
        handle = RemovableHandle(found.hooks)
        found.hooks[handle.id] = hook
        return handle

    @functools.wraps(own_retain)
    def retain_grad(self: torch.Tensor) -> None:
        found = taker(self)
        if found is not None:
            found.retains = True
        own_retain(self)

    methods: Any = torch.Tensor
    methods.register_hook, methods.retain_grad = register_hook, retain_grad
