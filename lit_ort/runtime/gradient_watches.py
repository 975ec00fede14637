"""Gradients of results of a graph from which it computes other results.

For autograd, the results of a graph don't depend on each other: it would call a hook on such a result with a part of
the gradient, or with None.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from lit_ort._compat.tensor_hooks import hand_over_node_hooks
from lit_ort._compat.torch import backward_in_progress, is_batched, version_of
from lit_ort.errors import SessionError

# The functions of autograd between a session's result and the output that is a view of it, or converts it.
_FUNCTIONS = 2
# The attribute of an output that is a view of an input, with its version.
_ALIAS = "_lit_ort_alias"
# The gradients that arrived at outputs, with the backward in which they did.
_Noted = dict[int, tuple[int, torch.Tensor]]


class Watch:
    """What is set on one result.

    Args:
        tensor: the result.

    Attributes:
        hooks: the hooks by the id of their handle.
        node_hooks: those on its `grad_fn`, which are called behind the others and what `retain_grad` keeps.
        retains: whether `retain_grad` was called.
        place: in autograd's graph, which changes if the tensor is changed in place.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], Any]] = OrderedDict()
        self.node_hooks: OrderedDict[int, Callable[[tuple[torch.Tensor]], Any]] = OrderedDict()
        self.retains = False
        self.place = _place_of(tensor.grad_fn, tensor.output_nr)[1:]

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
        for node_hook in list(self.node_hooks.values()):
            changed = node_hook((gradient,))
            gradient = gradient if changed is None else changed[0] if isinstance(changed, tuple) else changed
        return gradient

    def take_node_hook(self, hook: Callable[[tuple[torch.Tensor]], Any]) -> RemovableHandle:
        """Adds a hook that was set on the result's `grad_fn`, as `register_prehook` does."""
        handle = RemovableHandle(self.node_hooks)
        self.node_hooks[handle.id] = hook
        return handle


@dataclasses.dataclass(frozen=True)
class Watches:
    """What is set on the outputs of a run.

    Args:
        set_on: by position among the outputs.
        own: the gradients that arrived at outputs that share a result with others.
        target: the output with respect to which `torch.autograd.grad` differentiates, or None.
    """

    set_on: Mapping[int, Watch] = dataclasses.field(default_factory=dict)
    own: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    target: int | None = None


_NONE = Watches()


def watch(
    results: Sequence[torch.Tensor], outputs: list[Any], positions: Iterable[int], sharing: Iterable[int]
) -> None:
    """Lets `watch_of` find outputs of a graph.

    Args:
        results: what the session returned, tracked by autograd.
        outputs: of the graph; those that share a result get a function of autograd of their own.
        positions: among the outputs, of those that are watched.
        sharing: positions of outputs that share a result.
    """
    node: Any = next((result.grad_fn for result in results if result.grad_fn is not None), None)
    if node is None:
        return
    noted: _Noted = {}
    for k in sharing:
        if outputs[k].grad_fn is node:
            with torch.enable_grad():
                outputs[k] = outputs[k].view_as(outputs[k])
        # Behind hooks on the tensor, which can change its gradient.
        outputs[k].grad_fn.register_prehook(functools.partial(_note, noted, k))
    node.noted, node.watches = noted, {}
    for k in positions:
        function = outputs[k].grad_fn
        if _place_of(function, outputs[k].output_nr)[0] is node:
            node.watches[k] = Watch(outputs[k])
            if function is not node:
                hand_over_node_hooks(function, node.watches[k].take_node_hook, _refuse_node_hook)
        else:
            setattr(outputs[k], _ALIAS, version_of(outputs[k]))


def _refuse_node_hook(hook: Any) -> NoReturn:
    raise SessionError(
        "register_hook() is called on the grad_fn of a result from which a graph in ONNX Runtime computes others",
        remedy="Set the hook on the tensor, or exclude the function with torch.compiler.disable.",
    )


def _note(noted: _Noted, position: int, gradients: Sequence[torch.Tensor]) -> None:
    noted[position] = backward_in_progress(), gradients[0]


class Inner:
    """A watched output, for `torch.autograd.grad`.

    Args:
        node: of autograd, for the run of the graph.
        own: the position of its result.
        position: among the outputs.
    """

    def __init__(self, node: Any, own: int, position: int) -> None:
        self._own, self._node, self._position = own, node, position
        self.edges: Sequence[GradientEdge] = [GradientEdge(node, k) for k in range(node.results)]
        self.watch: Watch = node.watches[position]

    def begin(self) -> None:
        """Prepares for gradients at the edges."""
        self._node.noted.clear()

    def is_reached(self, arrived: Sequence[torch.Tensor | None]) -> bool:
        """Whether a gradient of another output, which can depend on this one, arrived."""
        others = any(gradient is not None for k, gradient in enumerate(arrived) if k != self._own)
        return others or not self._node.noted.keys() <= {self._position}

    def gradient(self, arrived: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Its gradient, for gradients of the results; in grad mode tracked by autograd."""
        received: list[torch.Tensor] = []
        node, watch = self._node, copy.copy(self.watch)
        # Behind the others, as autograd keeps what they leave.
        watch.hooks = OrderedDict([*watch.hooks.items(), (-1, received.append)])
        watch.node_hooks = OrderedDict()
        watch.retains = False
        at_results = {k: gradient for k, gradient in enumerate(arrived) if gradient is not None}
        own = {k: gradient for k, (_, gradient) in node.noted.items()}
        watches = Watches({**_set_on(node), self._position: watch}, own, self._position)
        node.in_eager(node.run, at_results, node.needs_input_grad[1:], watches)
        return received[-1] if received else None


def inner_of(value: torch.Tensor | GradientEdge) -> Inner | None:
    """The watched output that a tensor with a `grad_fn`, or the edge to one, is; None for any other.

    Raises:
        SessionError: its gradient is not known: it is a view of an input, or the edge to a tensor that is deleted.
    """
    function = value.node if isinstance(value, GradientEdge) else value.grad_fn
    node, number, between = _place_of(function, value.output_nr)
    if node is None:
        if isinstance(value, torch.Tensor) and getattr(value, _ALIAS, None) == version_of(value):
            raise SessionError(
                "a gradient is read, by a hook, retain_grad() or with respect to it, of a view of an input from which "
                "a graph in ONNX Runtime computes other results, but their part of it doesn't arrive there",
                remedy="Return a copy of it, with clone(), or exclude the function with torch.compiler.disable.",
            )
        return None
    same = [k for k, found in node.watches.items() if found.place == (number, between)]
    for k in same:
        tensor = node.watches[k].tensor()
        if tensor is value or (
            tensor is not None and (tensor.grad_fn, tensor.output_nr) == (function, value.output_nr)
        ):
            return Inner(node, number, k)
    if isinstance(value, GradientEdge) and any(node.watches[k].tensor() is None for k in same):
        raise SessionError(
            "a gradient is read at the edge of a result whose tensor is deleted, of a graph in ONNX Runtime",
            remedy="Keep a reference to the tensor until the backward.",
        )
    return None


def _place_of(function: Any, number: int) -> tuple[Any, int, int]:
    """The run of a graph from which a tensor comes, or None, the position of its result, and the functions between."""
    for between in range(_FUNCTIONS + 1):
        if hasattr(function, "watches"):
            return function, number, between
        if not getattr(function, "next_functions", ()):
            break
        function, number = function.next_functions[0]
    return None, 0, 0


def watch_of(tensor: torch.Tensor) -> Watch | None:
    """The watch of an output of a graph; None for any other tensor."""
    inner = inner_of(tensor)
    return None if inner is None else inner.watch


def is_result(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a result of a graph, and no view of one."""
    return hasattr(tensor.grad_fn, "in_eager")


def watches_of(ctx: Any) -> Watches:
    """What is set on the outputs of a run, in its backward."""
    if not hasattr(ctx, "watches"):
        return _NONE
    current = backward_in_progress()
    own = {k: gradient for k, (backward, gradient) in ctx.noted.items() if backward == current}
    ctx.noted.clear()
    set_on = _set_on(ctx)
    if set_on and any(map(is_batched, own.values())):
        raise SessionError(
            "torch.autograd.grad was called with is_grads_batched=True, and a hook or retain_grad() is set on one of "
            "several results of a graph in ONNX Runtime that share their memory",
            remedy="Differentiate for each row of the batch, or return a copy of the result, with clone().",
        )
    return Watches(set_on, own)


def _set_on(node: Any) -> dict[int, Watch]:
    return {k: found for k, found in node.watches.items() if found.hooks or found.node_hooks or found.retains}
