"""Digests graphs by content: graphs that compile to the same model have the same digest, in every process."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import fx

from lit_ort._compat import openmp
from lit_ort._compat.torch_aot import region_of
from lit_ort._compat.torch_fx import inputs_of
from lit_ort._compat.torch_ops import OpOverload, qualified_name
from lit_ort.backend.request import Request
from lit_ort.capture.numbers import size_symbols
from lit_ort.runtime.program import Form

# A name in these packages stands for the same code as long as the versions of torch and Python are the same. Elsewhere
# the code behind a name can change.
_KNOWN_PACKAGES = frozenset({"torch", "operator", "_operator", "builtins", "math"})
# Packages whose version is part of a function's name.
_VERSIONED_PACKAGES = frozenset({"einops"})
_KNOWN_OPERATORS = frozenset({"aten", "prims"})
_NAMED_TYPES = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclasses.dataclass(frozen=True)
class Content:
    """The content of a graph.

    Args:
        digest: equal for graphs that compile to the same model; None if the content doesn't determine the model.
        obstacle: the part of the graph that prevents a digest, or None.
    """

    digest: str | None
    obstacle: str | None = None


def content_of(request: Request) -> Content:
    """Digests a graph's operations and constants, the types of one call's inputs and the settings that tracing reads.

    If the graph is compiled for any size, symbolic sizes are digested by name and not by their value in this call.
    """
    module = request.graph.module
    placeholders = inputs_of(module.graph)
    operations = [node for node in module.graph.nodes if node.op != "placeholder"]
    positions = {node: position for position, node in enumerate((*placeholders, *operations))}
    try:
        open_sizes = size_symbols(placeholders) if request.any_sizes else {}
        inputs = [_input(node, tensor, open_sizes) for node, tensor in zip(placeholders, request.tensors, strict=False)]
        keys = [_value(key, {}) for key in request.keys]
        nodes = [_node(node, module, positions) for node in operations]
    except _Obstacle as obstacle:
        return Content(None, str(obstacle))
    plain = [_settings(request), inputs, keys, _form(request.form), nodes, request.graph.returned]
    return Content(hashlib.sha256(json.dumps(plain).encode()).hexdigest())


class _Obstacle(Exception):
    """A part of a graph that prevents a digest."""


def _settings(request: Request) -> list[str]:
    """The settings besides the graph that the program depends on."""
    # Native sessions on the threads of OpenMP are others.
    modes = (request.gradients, request.autocast, torch.are_deterministic_algorithms_enabled(), openmp.uses_openmp())
    return [str(setting) for setting in (torch.get_default_dtype(), torch.get_default_device(), *modes)]


def _form(form: Form | None) -> Any:
    return None if form is None else dataclasses.astuple(form)


def _input(node: fx.Node, tensor: torch.Tensor, open_sizes: Container[str]) -> Any:
    example = node.meta.get("example_value")
    sized = example if open_sizes and isinstance(example, torch.Tensor) else tensor
    return [str(node.target), tensor.is_leaf, *_tensor_type(tensor, sized)]


def _node(node: fx.Node, graph_module: fx.GraphModule, positions: Mapping[fx.Node, int]) -> Any:
    return [
        node.op,
        _target(node, graph_module),
        _value(node.args, positions),
        _value(node.kwargs, positions),
        _wants_gradient(node),
        region_of(node),
        _layers(node),
    ]


def _target(node: fx.Node, graph_module: fx.GraphModule) -> Any:
    if node.op == "call_function":
        return _function(node.target)
    if node.op == "get_attr":
        return _constant(str(node.target), operator.attrgetter(str(node.target))(graph_module))
    if node.op == "call_module":
        raise _Obstacle(f"it calls the module {node.target} as a whole")
    return str(node.target)


def _layers(node: fx.Node) -> list[str]:
    """The submodules that a node belongs to, which determine what the backward recomputes."""
    return [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]


def _wants_gradient(node: fx.Node) -> Any:
    """Whether a node's value requires a gradient, which also depends on the grad mode around the graph."""
    value = node.meta.get("example_value", node.meta.get("val"))
    return [value.requires_grad, value.is_floating_point()] if isinstance(value, torch.Tensor) else None


def _function(function: Any) -> str:
    """A name that identifies the same function in every process."""
    if isinstance(function, OpOverload):
        if function.namespace in _KNOWN_OPERATORS:
            return str(function)
        raise _Obstacle(f"it calls the custom operator {function}, whose code can change")
    try:
        # Attributes of tensors, such as x.T, become calls of getattr, for which torch's name has no module.
        name = "builtins.getattr" if function is getattr else qualified_name(function)
        package, *path = name.split(".")
        packages = _KNOWN_PACKAGES | _VERSIONED_PACKAGES
        known = package in packages and functools.reduce(getattr, path, sys.modules[package]) is function
    except (AttributeError, KeyError, RuntimeError):
        package, name, known = "", str(function), False
    if not known:
        raise _Obstacle(f"it calls {name}, which is not torch's and can change")
    return f"{name} {sys.modules[package].__version__}" if package in _VERSIONED_PACKAGES else name


def _constant(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise _Obstacle(f"its attribute {name} is a {type(value).__name__}, and only tensors are digested by value")
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [*_tensor_type(value, value), hashlib.sha256(data).hexdigest()]


def _tensor_type(tensor: torch.Tensor, sized: torch.Tensor) -> list[Any]:
    """The type of a tensor.

    Args:
        tensor: the tensor.
        sized: a tensor with the same sizes and strides, as numbers or as names.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise _Obstacle(f"it has an input of type {type(tensor).__name__} and layout {tensor.layout}")
    parts = (tensor.dtype, str(tensor.device), tuple(sized.shape), sized.stride(), tensor.requires_grad)
    return [str(part) for part in parts]


def _value(value: Any, positions: Mapping[fx.Node, int]) -> Any:
    """A node's argument as a JSON value, with its type."""
    inner: Callable[[Any], Any] = functools.partial(_value, positions=positions)
    if isinstance(value, fx.Node):
        return ["node", positions[value]]
    if value is None or value is Ellipsis:
        return repr(value)
    if type(value) in _NAMED_TYPES:
        return [type(value).__name__, repr(value)]
    if isinstance(value, slice):
        return ["slice", *map(inner, (value.start, value.stop, value.step))]
    if isinstance(value, (tuple, list)):
        return ["list" if isinstance(value, list) else "tuple", *map(inner, value)]
    if isinstance(value, dict):
        return ["dict", *([inner(name), inner(part)] for name, part in value.items())]
    if callable(value):
        return ["function", _function(value)]
    raise _Obstacle(f"an operation has an argument of type {type(value).__name__}, which has no JSON form")
