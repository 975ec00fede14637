"""Replaces what asks autograd for the gradient of a value: hooks, `retain_grad`, `autograd.grad` and `backward`."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import autograd
from torch._dynamo.eval_frame import skip_code
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from lit_ort.errors import SessionError

# Fabric's hooks on results check how a backward was called, and read no gradients.
_CHECKS = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


# The hooks of `register_multi_grad_hook`, which wait for each other.
_WAITING = "register_multi_grad_hook.<locals>.get_inner_hook"
# The attribute of a node's dictionary of hooks: what takes the hooks that torch would add to it.
_TAKER = "_lit_ort_taker"
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
    """

    edges: Sequence[GradientEdge]

    def is_reached(self, arrived: Sequence[torch.Tensor | None]) -> bool:
        """Whether gradients at the edges can be such of the result that autograd doesn't know of."""
        ...

    def gradient(self, arrived: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Its gradient, for gradients at the edges; in grad mode tracked by autograd."""
        ...

    def begin(self) -> None:
        """Prepares for gradients at the edges."""
        ...


def take_inputs(inner_of: Callable[[torch.Tensor | GradientEdge], Inner | None]) -> None:
    """Makes autograd differentiate with respect to results of graphs, for the rest of the process.

    Args:
        inner_of: the result that a tensor with a `grad_fn`, or an edge, is; None for values that autograd can
            differentiate for.
    """
    module: Any = autograd
    run: Any = module._engine_run_backward

    def gradients(
        outputs: Any, tangents: Any, keep: bool, create_graph: bool, inputs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        inner = {k: found for k, value in enumerate(inputs) if (found := _inner_of(value, inner_of)) is not None}
        if not inner:
            return run(outputs, tangents, keep, create_graph, inputs, *args, **kwargs)
        edges = [edge for result in inner.values() for edge in result.edges]
        if kwargs.get("accumulate_grad", True):
            # As torch does. The backward of the graph, which the edges call for, keeps the gradient.
            for k in inner:
                if isinstance(inputs[k], torch.Tensor):
                    inputs[k].retain_grad()
            return run(outputs, tangents, keep, create_graph, (*inputs, *edges), *args, **kwargs)
        for result in inner.values():
            result.begin()
        # Edges can be unused.
        arrived = run(outputs, tangents, keep, create_graph, (*inputs, *edges), True, accumulate_grad=False)
        computed, at_edges = list(arrived[: len(inputs)]), iter(arrived[len(inputs) :])
        for k, result in inner.items():
            own = list(itertools.islice(at_edges, len(result.edges)))
            if result.is_reached(own):
                with torch.set_grad_enabled(create_graph):
                    computed[k] = result.gradient(own)
        if not args[0] and any(gradient is None for gradient in computed):
            raise RuntimeError(_UNUSED)
        return tuple(computed)

    module._engine_run_backward = gradients


def _inner_of(value: Any, inner_of: Callable[[torch.Tensor | GradientEdge], Inner | None]) -> Inner | None:
    return inner_of(value) if isinstance(value, GradientEdge) else _of_plain(value, inner_of)


def _of_plain(tensor: Any, found_of: Callable[[torch.Tensor], Found | None]) -> Found | None:
    return found_of(tensor) if type(tensor) is torch.Tensor and tensor.grad_fn is not None else None


def take_hooks(taker_of: Callable[[torch.Tensor], Taker | None], is_result: Callable[[torch.Tensor], bool]) -> None:
    """Hands hooks on tensors over, for the rest of the process.

    Args:
        taker_of: what takes those of a tensor with a `grad_fn`, or None, which leaves them to autograd.
        is_result: whether autograd calls a tensor's hooks with None if a gradient of another result of its graph
            arrives. They are not called then.
    """
    own_register: Any = torch.Tensor.register_hook
    own_retain: Any = torch.Tensor.retain_grad
    own_of_node: Any = autograd.Function._register_hook

    @functools.wraps(own_register)
    def register_hook(self: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        # A partial function in Lightning 2.6.
        is_check = getattr(getattr(hook, "func", hook), "__module__", None) in _CHECKS
        found = None if is_check else _of_plain(self, taker_of)
        waits = _WAITING in getattr(hook, "__qualname__", "")
        if found is None:
            return own_register(self, _with_gradient(hook) if is_result(self) and not waits else hook)
        if waits:
            raise SessionError(
                "register_multi_grad_hook() is called for a result from which a graph in ONNX Runtime computes others",
                remedy="Set a hook on each tensor, or exclude the function with torch.compiler.disable.",
            )
        handle = RemovableHandle(found.hooks)
        found.hooks[handle.id] = hook
        return handle

    @functools.wraps(own_retain)
    def retain_grad(self: torch.Tensor) -> None:
        found = _of_plain(self, taker_of)
        if found is not None:
            found.retains = True
        own_retain(self)

    @functools.wraps(own_of_node)
    def register_at_node(hooks: Any, hook: Callable[..., Any]) -> Any:
        take = getattr(hooks, _TAKER, None)
        return own_of_node(hooks, hook) if take is None else (hooks, take(hook))

    own: tuple[Any, ...] = (register_hook, retain_grad, register_at_node)
    for method in own:
        # Since torch 2.14, Dynamo would trace torch's methods in them into a graph of their own.
        skip_code(method.__code__)
    methods: Any = torch.Tensor
    methods.register_hook, methods.retain_grad = register_hook, retain_grad
    function: Any = autograd.Function
    function._register_hook = staticmethod(register_at_node)


def _with_gradient(hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor | None], Any]:
    return lambda gradient: None if gradient is None else hook(gradient)


def _call_with_one(hook: Callable[..., Any], position: int, gradients: tuple[torch.Tensor | None, ...]) -> Any:
    changed = hook((gradients[position],))
    return None if changed is None else (*gradients[:position], *changed, *gradients[position + 1 :])


def hand_over_node_hooks(node: Any, take: Callable[[Callable[..., Any]], Any], refuse: Callable[[Any], Any]) -> None:
    """Hands over the hooks that are set on a node of autograd from now on.

    Args:
        node: of torch's own, such as that of a view.
        take: called with each hook of `register_prehook`; returns its handle.
        refuse: raises the error for those of `register_hook`.
    """
    for register, taker in ((node.register_prehook, take), (node.register_hook, refuse)):
        handle = register(_no_change)
        setattr(handle.hooks_dict_ref(), _TAKER, taker)
        handle.remove()


def _no_change(*gradients: Any) -> None:
    pass


def take_node_hooks(function: type[autograd.Function], position: int | None, refuse: Callable[[], NoReturn]) -> None:
    """Lets a hook on a function's node see the gradient of its one differentiable result, as in eager.

    Args:
        function: an autograd function that computes what a graph of operators does.
        position: of that result; None if there are several.
        refuse: raises the error for hooks that eager calls with other values.
    """
    node: Any = function
    node = node._backward_cls
    own_register = node.register_prehook

    def register_prehook(self: Any, hook: Callable[..., Any]) -> Any:
        return refuse() if position is None else own_register(self, functools.partial(_call_with_one, hook, position))

    def register_hook(self: Any, hook: Callable[..., Any]) -> Any:
        refuse()

    node.register_prehook, node.register_hook = register_prehook, register_hook
