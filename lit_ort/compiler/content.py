"""Graphs by content: one digest for all graphs that become the same model, in this process and in any other."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import _get_qualified_name  # pyright: ignore[reportPrivateUsage] - knows torch's odd names

from lit_ort.compiler.checkpoints import INSIDE
from lit_ort.compiler.numbers import size_symbols

# What is found in these by name is decided by the versions of torch and Python. Other code may change under its name.
_KNOWN_PACKAGES = frozenset({"torch", "operator", "_operator", "builtins", "math"})
_KNOWN_OPERATORS = frozenset({"aten", "prims"})
_NAMED_TYPES = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclasses.dataclass(frozen=True)
class Content:
    """What a graph is.

    Args:
        digest: equal for graphs that become the same model; None where its content doesn't tell all of it.
        obstacle: what it doesn't tell, or None.
    """

    digest: str | None
    obstacle: str | None = None


def content_of(graph_module: fx.GraphModule, arguments: Sequence[Any], any_sizes: bool = False) -> Content:
    """Digests a graph's operations and constants, the types of one call's inputs and the settings that export reads.

    Args:
        graph_module: Dynamo's graph, its numbers settled.
        arguments: one call's inputs: tensors, and Python numbers where Dynamo kept a size or number symbolic.
        any_sizes: symbolic sizes count by name, and not by their value in this call.
    """
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    # Dynamo hands over sizes that no operation reads.
    given = {n: a for n, a in zip(placeholders, arguments, strict=True) if n.users or isinstance(a, torch.Tensor)}
    operations = [node for node in graph_module.graph.nodes if node.op != "placeholder"]
    positions = {node: position for position, node in enumerate((*given, *operations))}
    try:
        open_sizes = size_symbols(placeholders) if any_sizes else {}
        inputs = [_input(node, argument, open_sizes) for node, argument in given.items()]
        nodes = [_node(node, graph_module, positions) for node in operations]
    except _Obstacle as obstacle:
        return Content(None, str(obstacle))
    return Content(hashlib.sha256(json.dumps([_settings(), inputs, nodes]).encode()).hexdigest())


class _Obstacle(Exception):
    """Something that its content doesn't tell."""


def _settings() -> list[str]:
    """What decides about the model beside the graph."""
    autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    return [str(setting) for setting in (torch.get_default_dtype(), torch.get_default_device(), *autocast)]


def _input(node: fx.Node, argument: Any, open_sizes: Container[str]) -> Any:
    name, example = str(node.target), node.meta.get("example_value")
    if isinstance(argument, torch.Tensor):
        sized = example if open_sizes and isinstance(example, torch.Tensor) else argument
        return [name, *_tensor_type(argument, sized)]
    return [name, str(example) if str(example) in open_sizes else _value(argument, {})]


def _node(node: fx.Node, graph_module: fx.GraphModule, positions: Mapping[fx.Node, int]) -> Any:
    return [
        node.op,
        _target(node, graph_module),
        _value(node.args, positions),
        _value(node.kwargs, positions),
        _wants_gradient(node),
        node.meta.get(INSIDE),
        _layers(node),
    ]


def _target(node: fx.Node, graph_module: fx.GraphModule) -> Any:
    if node.op == "call_function":
        return _function(node.target)
    if node.op == "get_attr":
        return _constant(str(node.target), functools.reduce(getattr, str(node.target).split("."), graph_module))
    if node.op == "call_module":
        raise _Obstacle(f"it calls the module {node.target} as a whole")
    return str(node.target)


def _layers(node: fx.Node) -> list[str]:
    """Where a node is among the module's parts, which decides what is computed again in the backward."""
    return [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]


def _wants_gradient(node: fx.Node) -> Any:
    """Where eager autograd stops is part of the graph, also where grad mode is switched outside of it."""
    value = node.meta.get("example_value", node.meta.get("val"))
    return [value.requires_grad, value.is_floating_point()] if isinstance(value, torch.Tensor) else None


def _function(function: Any) -> str:
    """A name that stands for the same function in every process."""
    if isinstance(function, torch._ops.OpOverload):
        if function.namespace in _KNOWN_OPERATORS:
            return str(function)
        raise _Obstacle(f"it calls the custom operator {function}, whose code may change")
    try:
        name = _get_qualified_name(function)
        package, *path = name.split(".")
        known = package in _KNOWN_PACKAGES and functools.reduce(getattr, path, sys.modules[package]) is function
    except (AttributeError, KeyError, RuntimeError):
        name, known = str(function), False
    if not known:
        raise _Obstacle(f"it calls {name}, which is not torch's and may change")
    return name


def _constant(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise _Obstacle(f"its attribute {name} is a {type(value).__name__}, and tensors are told by value")
    described = _tensor_type(value, value)
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [*described, hashlib.sha256(data).hexdigest()]


def _tensor_type(tensor: torch.Tensor, sized: torch.Tensor) -> list[Any]:
    """Args: sized: what has its sizes, as numbers or names."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise _Obstacle(f"it takes a {type(tensor).__name__} with the layout {tensor.layout}")
    described = (tensor.dtype, tensor.device.type, tuple(sized.shape), sized.stride(), tensor.requires_grad)
    return [str(part) for part in described]


def _value(value: Any, positions: Mapping[fx.Node, int]) -> Any:
    """A node's argument, as JSON has it; types stay apart."""
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
    raise _Obstacle(f"an operation takes a {type(value).__name__}, which has no plain form")
