"""AOTAutograd's joint graph, with what its inputs and outputs are in plain words.

The gradient is torch's: every operator, autograd.Function, detach, no_grad, autocast and buffer update that torch
differentiates is right without a list. Writes in place and aliases are gone from the graph; what they did to inputs and
outputs is in the `JointGraph`.
"""

from __future__ import annotations

import dataclasses
import functools
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
    joint_trace,
    keep_effect,
    writes_of,
)
from lit_ort._compat.torch_fx import correct_statistics, first_argument, inputs_of, output_of
from lit_ort._compat.torch_ops import HigherOrderOperator, result_count
from lit_ort.capture.examples import Examples
from lit_ort.errors import CaptureError
from lit_ort.runtime.program import DETACHED, NO_GRAD, TRACKED

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """Forward and backward in one graph.

    Args:
        module: its inputs are the graph's tensors, then the tangents; its outputs the results, then the gradients.
        results: what each result is: `output`, `mutation` or `base`.
        gradients: for each gradient, the tensor input that it is of.
        tangents: for each tangent, the position of the result whose gradient it is.
        aliases: for each output that is an alias: whether it is the `same` as an input, or lies in the memory of an
            `input` or of a `result`, and which.
        modes: for each mutated input, what autograd sees of the write.
        differentiable: whether there is a backward.
    """

    module: fx.GraphModule
    results: tuple[Description, ...]
    gradients: tuple[int, ...]
    tangents: tuple[int, ...]
    aliases: dict[int, tuple[str, int]]
    modes: dict[int, str]
    differentiable: bool


def trace(module: fx.GraphModule, examples: Examples) -> JointGraph:
    """Traces a graph's forward and backward.

    Raises:
        CaptureError: inputs that share memory, of which one is changed; an input that changes its shape; tensors of
            classes of their own. Whatever else tracing raises comes through as it is.
    """
    traced = joint_trace(module, examples.tensors, examples.mode)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(traced.graph_module.graph, values)
    correct_statistics(graph)
    flat = _flat(output)
    described_outputs = descriptor_of(output_of(traced.graph_module.graph))
    pairs = zip(flat, _descriptions(described_outputs, len(flat)), strict=True)
    pairs = [(value, description) for value, description in pairs if description is None or description.kind != "token"]
    flat, descriptions = [value for value, _ in pairs], [description for _, description in pairs]
    inputs = inputs_of(traced.graph_module.graph)
    given = [_described(descriptor_of(node)) for node in inputs]
    # AOTAutograd counts the module's constants among the inputs, ahead of the graph's own.
    places = [d.index if d.kind == "input" else None for d in given if d.kind in ("input", "constant")]
    results = tuple(d for d in descriptions if d is not None and d.kind != "gradient")
    positions = {(d.kind, d.index): k for k, d in enumerate(results)}
    gradients = [(d.index, value) for d, value in zip(descriptions, flat, strict=True) if d and d.kind == "gradient"]
    gradients = [(index, value) for index, value in gradients if isinstance(value, fx.Node)]
    _require_dense([value for _, value in gradients])
    graph.output((*flat[: len(results)], *(value for _, value in gradients)))
    for node, description in zip(inputs, given, strict=True):
        values[node].meta["described"] = description
    _release_effects(graph)
    _require_operators(graph)
    return JointGraph(
        _with_constants(traced.graph_module, graph, module),
        results,
        tuple(index for index, _ in gradients),
        tuple(positions[_kind_of_tangent(d), d.index] for d in given if d.kind == "tangent"),
        _aliases(traced.metadata, results, places),
        _modes(traced.metadata, places),
        traced.differentiable,
    )


def _flat(output: Any) -> list[Any]:
    return list(output[0]) if len(output) == 1 and isinstance(output[0], (list, tuple)) else list(output)


def _descriptions(descriptors: Any, count: int) -> list[Description | None]:
    found = [None if descriptor is None else _described(descriptor) for descriptor in descriptors]
    assert len(found) == count, "a descriptor for each output"
    return found


def _described(descriptor: Any) -> Description:
    found = description_of(descriptor)
    if found is None:
        raise CaptureError(
            f"AOTAutograd makes {type(descriptor).__name__} of an input or output: inputs share memory and one is "
            "changed in place, or a tensor has a class of its own",
            remedy="Clone one of the tensors before the step, or keep this part out of it with torch.compiler.disable.",
        )
    return found


def _kind_of_tangent(tangent: Description) -> str:
    return "mutation" if tangent.of_mutation else "base" if tangent.of_base else "output"


def _with_constants(root: fx.GraphModule, graph: fx.Graph, captured: fx.GraphModule) -> fx.GraphModule:
    """The traced graph with the captured one's constants as attributes, which AOTAutograd has made inputs."""
    for node in inputs_of(graph):
        description = node.meta["described"]
        if description.kind == "constant":
            name = f"captured_{description.name.replace('.', '_')}"
            setattr(root, name, functools.reduce(getattr, description.name.split("."), captured))
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            constant.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
    return fx.GraphModule(root, graph)


def _release_effects(graph: fx.Graph) -> None:
    """Writes operators with effects, such as a decomposition's check, as plain calls; their order is the graph's."""
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
                f"{target} has effects and several results",
                remedy="Keep this part out of the step with torch.compiler.disable.",
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
        if node.meta["described"].kind == "token":
            graph.erase_node(node)


def _require_operators(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            raise CaptureError(
                f"the graph has {node.target}, which chooses or repeats graphs, and sessions run one",
                remedy="Write it with torch.where, or as Python control flow.",
                operator=str(node.target),
            )


def _require_dense(gradients: Sequence[fx.Node]) -> None:
    for node in gradients:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise CaptureError(
                f"a gradient is a sparse tensor ({value.layout}), and sessions give dense ones",
                remedy="Leave out sparse=True, or keep this module out of the step with torch.compiler.disable.",
                operator=str(node.target),
            )


def _aliases(metadata: Any, results: Sequence[Description], places: Sequence[int | None]) -> dict[int, tuple[str, int]]:
    """The outputs that lie in the memory of an input or of another result.

    Args:
        places: the graph's input that each of AOTAutograd's is; None for a constant.
    """
    bases = [k for k, result in enumerate(results) if result.kind == "base"]
    outputs = {result.index: k for k, result in enumerate(results) if result.kind == "output"}
    found: dict[int, tuple[str, int]] = {}
    for position, (kind, of) in aliases_of(metadata).items():
        if kind == "base":
            found[position] = ("result", bases[of])
        elif kind == "output":
            found[position] = ("result", outputs[of])
        else:
            place = places[of]
            # What lies in a constant is computed, as its owner is not to be changed.
            if place is not None:
                found[position] = (kind, place)
    return found


def _modes(metadata: Any, places: Sequence[int | None]) -> dict[int, str]:
    modes: dict[int, str] = {}
    for k, write in writes_of(metadata).items():
        position = places[k]
        if write.reshapes:
            raise CaptureError(
                f"input {position} changes its shape or its memory in the graph, and sessions change values alone",
                remedy="Assign the changed tensor to a new name instead of changing it in place.",
            )
        if position is None:
            raise CaptureError(
                "a constant of the graph is changed in place, and sessions keep their constants",
                remedy="Register the tensor as a buffer of the module.",
            )
        unseen = write.under_no_grad or not write.requires_grad
        modes[position] = DETACHED if write.hidden else NO_GRAD if unseen else TRACKED
    return modes
