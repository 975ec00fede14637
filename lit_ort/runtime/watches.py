"""Gradients of results of a graph from which it computes other results.

For autograd, the results of a graph don't depend on each other: it would call a hook on such a result with a part of
the gradient, or with None.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

# The functions of autograd between a session's result and the output that is a view of it, or converts it.
_FUNCTIONS = 2


class Watch:
    """What is set on one result.

    Args:
        tensor: the result.

    Attributes:
        hooks: the hooks by the id of their handle.
        retains: whether `retain_grad` was called.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], Any]] = OrderedDict()
        self.retains = False

    def receive(self, gradient: torch.Tensor, retained: torch.Tensor | None) -> torch.Tensor:
        """Calls the hooks and keeps the gradient.

        Args:
            gradient: of the result.
            retained: the part of it that autograd has kept before.

        Returns:
            the gradient as the hooks leave it.
        """
        for hook in list(self.hooks.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        tensor = self.tensor()
        if self.retains and tensor is not None:
            kept = tensor.grad if retained is None or tensor.grad is None else tensor.grad - retained
            tensor.grad = gradient.clone() if kept is None else kept + gradient
        return gradient


Watches = Mapping[int, Watch]


def watch(results: Sequence[torch.Tensor], outputs: Sequence[Any], positions: Iterable[int]) -> None:
    """Lets `watch_of` find outputs of a graph.

    Args:
        results: what the session returned, tracked by autograd.
        outputs: of the graph.
        positions: among the outputs, of those that are watched.
    """
    node: Any = next((result.grad_fn for result in results if result.grad_fn is not None), None)
    if node is not None:
        node.watches = {k: Watch(outputs[k]) for k in positions}


class Inner:
    """A watched output, for `torch.autograd.grad`.

    Args:
        node: of autograd, for the run of the graph.
        own: the position of its result.
        position: among the outputs.
    """

    def __init__(self, node: Any, own: int, position: int) -> None:
        self.own, self._node, self._position = own, node, position
        self.edges: Sequence[GradientEdge] = [GradientEdge(node, k) for k in range(node.results)]
        self.watch: Watch = node.watches[position]

    def gradient(self, arrived: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Its gradient, for gradients of the results; in grad mode tracked by autograd."""
        received: list[torch.Tensor] = []
        node, watch = self._node, copy.copy(self.watch)
        # Behind the others, as autograd keeps what they leave.
        watch.hooks = OrderedDict([*watch.hooks.items(), (-1, received.append)])
        watch.retains = False
        at_results = {k: gradient for k, gradient in enumerate(arrived) if gradient is not None}
        node.in_eager(node.run, at_results, node.needs_input_grad[1:], {self._position: watch})
        return received[-1] if received else None


def inner_of(tensor: torch.Tensor) -> Inner | None:
    """The watched output that a tensor with a `grad_fn` is; None for any other."""
    node: Any = tensor.grad_fn
    own = tensor.output_nr
    for _ in range(_FUNCTIONS):
        if node is None or hasattr(node, "watches"):
            break
        node, own = node.next_functions[0] if node.next_functions else (None, 0)
    watches: Watches = getattr(node, "watches", {})
    return next((Inner(node, own, k) for k, found in watches.items() if found.tensor() is tensor), None)


def watch_of(tensor: torch.Tensor) -> Watch | None:
    """The watch of an output of a graph; None for any other tensor."""
    inner = inner_of(tensor)
    return None if inner is None else inner.watch


def watches_of(ctx: Any) -> Watches:
    """The watches of a run on which something is set, by position among the outputs."""
    watches: Watches = getattr(ctx, "watches", {})
    return {k: found for k, found in watches.items() if found.hooks or found.retains}
