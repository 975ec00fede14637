"""Graphs as the joint room gets them, and runs of what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lit_ort._compat import torch_fx
from lit_ort.capture.capture import Captured, capture
from lit_ort.capture.checkpoints import inline_checkpoints
from lit_ort.capture.numbers import separate_numbers
from lit_ort.joint.outputs import Returned, settle_outputs
from lit_ort.joint.phases import SOURCE, PhaseGraph
from lit_ort.joint.trace import JointGraph, trace

Function = Callable[..., Any]


def captured(function: Function, *inputs: Tensor) -> Captured:
    """A function's ATen graph, whose inputs are in the order the function reads them in."""
    copies = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    originals = {id(copy): value for copy, value in zip(copies, inputs, strict=True)}
    found: list[Captured] = []

    def capture_only(graph_module: fx.GraphModule, _: Sequence[Any]) -> Function:
        def run(*arguments: Any) -> Any:
            graph = separate_numbers(inline_checkpoints(graph_module))
            tensors, keys, _ = graph.arguments([originals.get(id(given), given) for given in arguments])
            found.append(capture(graph, tensors, keys, any_sizes=False))
            return graph_module(*arguments)

        return run

    torch.compile(function, backend=capture_only)(*copies)
    (graph,) = found
    return graph


def joint_of(function: Function, *inputs: Tensor) -> JointGraph:
    found = captured(function, *inputs)
    return trace(found.module, found.examples)


def returned_by(function: Function, *inputs: Tensor) -> Returned:
    found = captured(function, *inputs)
    joint = trace(found.module, found.examples)
    values = [torch_fx.example_of(node) for node in torch_fx.returned_by(found.module.graph)]
    return settle_outputs(joint, found.examples.tensors, values, lambda sizes: tuple(map(int, sizes)))


def run(phase: PhaseGraph, values: dict[tuple[str, int], Tensor]) -> list[Any]:
    """The outputs of a phase.

    Args:
        values: by kind and index of the sources.
    """
    sources = [node.meta[SOURCE] for node in phase.module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        return list(fx.Interpreter(phase.module).run(*(values[source.kind, source.index] for source in sources)))


def tensors(*inputs: Tensor) -> dict[tuple[str, int], Tensor]:
    """Inputs of a graph as values of a phase's sources."""
    return {("tensor", k): value for k, value in enumerate(inputs)}


def count(phase: PhaseGraph, target: Any) -> int:
    return sum(node.target is target for node in phase.module.graph.nodes)
