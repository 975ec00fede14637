"""Traces the joint graph with AOTAutograd, and describes its inputs and outputs.

The gradient is torch's: every operator, autograd.Function, detach, no_grad, autocast and buffer update that torch
differentiates is correct without a list. The joint graph has no in-place operators and no aliases; their effects on
inputs and outputs are described by `JointGraph`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import (
    Description,
    aliases_of,
    description_of,
    descriptor_of,
    effect_of,
    grad_mode_after,
    joint_trace,
    keep_effect,
    writes_of,
)
from lit_ort._compat.torch_fx import (
    correct_statistics,
    correct_strides,
    first_argument,
    graph_module_of,
    inputs_of,
    output_of,
)
from lit_ort._compat.torch_ops import HigherOrderOperator, result_count
from lit_ort.capture.examples import Examples
from lit_ort.capture.input_sources import SOURCE
from lit_ort.errors import CaptureError
from lit_ort.runtime.program import DETACHED, NO_GRAD, TRACKED

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """Forward and backward in one graph.

    Args:
        module: the graph; its inputs are the captured graph's, each with its `Source`, then the tangents, and its
            outputs are the results, then the gradients.
        results: the description of each result: an `output`, `mutation` or `base`.
        gradients: for each gradient, the position of its tensor input.
        tangents: for each tangent, the position of the result whose gradient it is.
        aliases: for each output that is an alias: whether it is the `same` tensor as an input, or a view of an `input`
            or of a `result`, and the position of the latter.
        modes: for each mutated input, how autograd treats the in-place change.
        differentiable: whether there is a backward.
        grad_mode: the grad mode that the graph sets for the code after it, or None.
    """

    module: fx.GraphModule
    results: tuple[Description, ...]
    gradients: tuple[int, ...]
    tangents: tuple[int, ...]
    aliases: dict[int, tuple[str, int]]
    modes: dict[int, str]
    differentiable: bool
    grad_mode: bool | None


def trace(module: fx.GraphModule, examples: Examples) -> JointGraph:
    """Traces the forward and backward of a graph.

    Raises:
        CaptureError: inputs share memory and one of them is changed in place; an input changes its shape or storage; a
            constant is changed in place; an input or output is a tensor subclass; a gradient is sparse; the graph has
            higher-order operators. Other errors of tracing are not caught.
    """
    traced = joint_trace(module, examples.tensors, examples.mode)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(traced.graph_module.graph, values)
    correct_statistics(graph)
    correct_strides(graph)
    flat = _flat(output)
    output_descriptors = descriptor_of(output_of(traced.graph_module.graph))
    pairs = zip(flat, _descriptions(output_descriptors, len(flat)), strict=True)
    pairs = [(value, description) for value, description in pairs if description is None or description.kind != "token"]
    flat, descriptions = [value for value, _ in pairs], [description for _, description in pairs]
    inputs = inputs_of(traced.graph_module.graph)
    of_inputs = [_description(descriptor_of(node)) for node in inputs]
    # AOTAutograd counts the module's constants as inputs, before those of the graph.
    input_positions = [d.index if d.kind == "input" else None for d in of_inputs if d.kind in ("input", "constant")]
    results = tuple(d for d in descriptions if d is not None and d.kind != "gradient")
    positions = {(d.kind, d.index): k for k, d in enumerate(results)}
    gradients = [(d.index, value) for d, value in zip(descriptions, flat, strict=True) if d and d.kind == "gradient"]
    gradients = [(index, value) for index, value in gradients if isinstance(value, fx.Node)]
    _require_dense([value for _, value in gradients])
    graph.output((*flat[: len(results)], *(value for _, value in gradients)))
    sources = [node.meta[SOURCE] for node in inputs_of(module.graph)]
    for node, description in zip(inputs, of_inputs, strict=True):
        values[node].meta["description"] = description
        if description.kind == "input":
            values[node].meta[SOURCE] = sources[description.index]
    _unwrap_effects(graph)
    _require_operators(graph)
    return JointGraph(
        _with_constants(traced.graph_module, graph, module),
        results,
        tuple(index for index, _ in gradients),
        tuple(positions[_kind_of_tangent(d), d.index] for d in of_inputs if d.kind == "tangent"),
        _aliases(traced.metadata, results, input_positions),
        _modes(traced.metadata, input_positions),
        traced.differentiable,
        grad_mode_after(traced.metadata),
    )


def tangents_of(module: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a joint graph that are gradients of results, in order."""
    return [node for node in inputs_of(module.graph) if node.meta["description"].kind == "tangent"]


def _flat(output: Any) -> list[Any]:
    return list(output[0]) if len(output) == 1 and isinstance(output[0], (list, tuple)) else list(output)


def _descriptions(descriptors: Any, count: int) -> list[Description | None]:
    descriptions = [None if descriptor is None else _description(descriptor) for descriptor in descriptors]
    assert len(descriptions) == count, "a descriptor for each output"
    return descriptions


def _description(descriptor: Any) -> Description:
    description = description_of(descriptor)
    if description is None:
        raise CaptureError(
            f"AOTAutograd describes an input or output as {type(descriptor).__name__}: two inputs share memory and one "
            "of them is changed in place, or a tensor is a subclass of torch.Tensor",
            remedy="Clone one of the tensors before the step, or exclude this code with torch.compiler.disable.",
        )
    return description


def _kind_of_tangent(tangent: Description) -> str:
    return "mutation" if tangent.of_mutation else "base" if tangent.of_base else "output"


def _with_constants(root: fx.GraphModule, graph: fx.Graph, captured: fx.GraphModule) -> fx.GraphModule:
    """Return the traced graph with constants as attributes; AOTAutograd has turned them into inputs."""
    for node in inputs_of(graph):
        description = node.meta["description"]
        if description.kind == "constant":
            name = f"captured_{description.name.replace('.', '_')}"
            setattr(root, name, operator.attrgetter(description.name)(captured))
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            constant.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
    return graph_module_of(root, graph)


def _unwrap_effects(graph: fx.Graph) -> None:
    """Replaces calls that order effectful operators, such as assertions in decompositions, by plain calls.

    The order of the graph's nodes is sufficient.

    Raises:
        CaptureError: an effectful operator has more than one result.
    """
    for node in list(graph.nodes):
        effect = effect_of(node)
        if effect is None:
            continue
        target, args = effect
        keep_effect(target)
        with graph.inserting_before(node):
            call = graph.call_function(target, args, dict(node.kwargs))
        call.meta = {**node.meta, "val": None}
        if result_count(target) > 1:
            raise CaptureError(
                f"{target} has side effects and more than one result, which is not supported",
                remedy="Exclude this code from the step with torch.compiler.disable.",
                operator=str(target),
            )
        for user in list(node.users):
            position = user.args[1] if user.target is operator.getitem else None
            if position == 0:
                user.replace_all_uses_with(first_argument(node))
                graph.erase_node(user)
            else:
                call.meta["val"] = user.meta.get("val")
                user.replace_all_uses_with(call)
                graph.erase_node(user)
        graph.erase_node(node)
    for node in inputs_of(graph):
        if node.meta["description"].kind == "token":
            graph.erase_node(node)


def _require_operators(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            raise CaptureError(
                f"the graph has {node.target}, which calls other graphs, but a session runs a single graph",
                remedy="Use torch.where or Python control flow instead.",
                operator=str(node.target),
            )


def _require_dense(gradients: Sequence[fx.Node]) -> None:
    for node in gradients:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise CaptureError(
                f"a gradient is a sparse tensor ({value.layout}), but sessions return dense tensors only",
                remedy="Remove sparse=True, or exclude this module from the step with torch.compiler.disable.",
                operator=str(node.target),
            )


def _aliases(
    metadata: Any, results: Sequence[Description], input_positions: Sequence[int | None]
) -> dict[int, tuple[str, int]]:
    """The outputs that are views of an input or of another result.

    Args:
        metadata: AOTAutograd's metadata.
        results: the results of the joint graph.
        input_positions: for each input of AOTAutograd, the position of the graph's input; None for a constant.
    """
    bases = [k for k, result in enumerate(results) if result.kind == "base"]
    outputs = {result.index: k for k, result in enumerate(results) if result.kind == "output"}
    aliases: dict[int, tuple[str, int]] = {}
    for position, (kind, index) in aliases_of(metadata).items():
        if kind == "base":
            aliases[position] = ("result", bases[index])
        elif kind == "output":
            aliases[position] = ("result", outputs[index])
        else:
            input_position = input_positions[index]
            # A view of a constant is computed as a result, so that the caller can't change the constant.
            if input_position is not None:
                aliases[position] = (kind, input_position)
    return aliases


def _modes(metadata: Any, input_positions: Sequence[int | None]) -> dict[int, str]:
    modes: dict[int, str] = {}
    for k, write in writes_of(metadata).items():
        position = input_positions[k]
        if write.reshapes:
            raise CaptureError(
                f"input {position} changes its shape or storage in the graph, but sessions can change values only",
                remedy="Assign the changed tensor to a new variable instead of changing it in place.",
            )
        if position is None:
            raise CaptureError(
                "a constant of the graph is changed in place, but sessions can't change constants",
                remedy="Register the tensor as a buffer of the module.",
            )
        is_untracked = write.under_no_grad or not write.requires_grad
        modes[position] = DETACHED if write.hidden else NO_GRAD if is_untracked else TRACKED
    return modes
