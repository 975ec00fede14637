"""Replaces what asks autograd for the gradient of a value: `register_hook`, `retain_grad` and `torch.autograd.grad`."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import autograd
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

# Fabric's hooks on results check how a backward was called, and read no gradients.
_CHECKS = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


# Torch's words.
_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)
Found = TypeVar("Found")


class Taker(Protocol):
    """What takes the hooks of one tensor.

    Attributes:
        hooks: the hooks by the id of their handle.
        retains: whether the tensor's gradient is kept.
    """

    hooks: OrderedDict[int, Callable[[torch.Tensor], Any]]
    retains: bool


class Inner(Protocol):
    """A result of a graph from which the graph computes others.

    Attributes:
        edges: where gradients arrive at the results of the graph.
        own: the position of the result itself.
    """

    edges: Sequence[GradientEdge]
    own: int

    def gradient(self, arrived: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Its gradient, for gradients at the edges; in grad mode tracked by autograd."""
        ...


def take_inputs(inner_of: Callable[[torch.Tensor], Inner | None]) -> None:
    """Makes `torch.autograd.grad` differentiate with respect to results of graphs, for the rest of the process.

    Args:
        inner_of: the result that a tensor with a `grad_fn` is; None for tensors that autograd can differentiate for.
    """
    module: Any = autograd
    run: Any = module._engine_run_backward

    def gradients(
        outputs: Any, tangents: Any, keep: bool, create_graph: bool, inputs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        inner = {k: found for k, tensor in enumerate(inputs) if (found := _of_plain(tensor, inner_of)) is not None}
        if not inner or kwargs.get("accumulate_grad", True):
            return run(outputs, tangents, keep, create_graph, inputs, *args, **kwargs)
        edges = [edge for result in inner.values() for edge in result.edges]
        # Edges can be unused.
        arrived = run(outputs, tangents, keep, create_graph, (*inputs, *edges), True, accumulate_grad=False)
        computed, at_edges = list(arrived[: len(inputs)]), iter(arrived[len(inputs) :])
        for k, result in inner.items():
            own = list(itertools.islice(at_edges, len(result.edges)))
            if any(gradient is not None for j, gradient in enumerate(own) if j != result.own):
                with torch.set_grad_enabled(create_graph):
                    computed[k] = result.gradient(own)
        if not args[0] and any(gradient is None for gradient in computed):
            raise RuntimeError(_UNUSED)
        return tuple(computed)

    module._engine_run_backward = gradients


def _of_plain(tensor: Any, found_of: Callable[[torch.Tensor], Found | None]) -> Found | None:
    return found_of(tensor) if type(tensor) is torch.Tensor and tensor.grad_fn is not None else None


def take_hooks(taker_of: Callable[[torch.Tensor], Taker | None]) -> None:
    """Hands hooks on tensors over, for the rest of the process.

    Args:
        taker_of: what takes those of a tensor with a `grad_fn`, or None, which leaves them to autograd.
    """
    own_register: Any = torch.Tensor.register_hook
    own_retain: Any = torch.Tensor.retain_grad

    @functools.wraps(own_register)
    def register_hook(self: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        # A partial function in Lightning 2.6.
        is_check = getattr(getattr(hook, "func", hook), "__module__", None) in _CHECKS
        found = None if is_check else _of_plain(self, taker_of)
        if found is None:
            return own_register(self, hook)
        handle = RemovableHandle(found.hooks)
        found.hooks[handle.id] = hook
        return handle

    @functools.wraps(own_retain)
    def retain_grad(self: torch.Tensor) -> None:
        found = _of_plain(self, taker_of)
        if found is not None:
            found.retains = True
        own_retain(self)

    methods: Any = torch.Tensor
    methods.register_hook, methods.retain_grad = register_hook, retain_grad
