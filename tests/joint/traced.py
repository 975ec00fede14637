"""Helpers that capture and trace functions for tests of lit_ort.joint, and run phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lit_ort._compat import torch_fx
from lit_ort.capture.capture import Captured, capture
from lit_ort.capture.inlined_checkpoints import inline_checkpoints
from lit_ort.capture.input_sources import SOURCE
from lit_ort.capture.numbers import separate_numbers
from lit_ort.joint.outputs import Returned, normalize_outputs
from lit_ort.joint.phases import PhaseGraph
from lit_ort.joint.trace import JointGraph, trace

Function = Callable[..., Any]


def captured(function: Function, *inputs: Tensor) -> Captured:
    """The captured graph of a function; its inputs are in the order in which the function reads them."""
    copies = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    originals = {id(copy): value for copy, value in zip(copies, inputs, strict=True)}
    graphs: list[Captured] = []

    def capture_only(graph_module: fx.GraphModule, _: Sequence[Any]) -> Function:
        def run(*arguments: Any) -> Any:
            graph = separate_numbers(inline_checkpoints(graph_module))
            tensors, keys, _ = graph.arguments([originals.get(id(argument), argument) for argument in arguments])
            graphs.append(capture(graph, tensors, keys, any_sizes=False))
            return graph_module(*arguments)

        return run

    torch.compile(function, backend=capture_only)(*copies)
    (graph,) = graphs
    return graph


def joint_of(function: Function, *inputs: Tensor) -> JointGraph:
    graph = captured(function, *inputs)
    return trace(graph.module, graph.examples)


def returned_by(function: Function, *inputs: Tensor) -> Returned:
    graph = captured(function, *inputs)
    joint = trace(graph.module, graph.examples)
    values = [torch_fx.example_of(node) for node in torch_fx.returned_by(graph.module.graph)]
    return normalize_outputs(joint, graph.examples.tensors, values, {})


def run(phase: PhaseGraph, values: dict[tuple[str, int], Tensor]) -> list[Any]:
    """Runs a phase and returns its outputs.

    Args:
        phase: the phase.
        values: its inputs, by kind and index of their sources.
    """
    sources = [node.meta[SOURCE] for node in phase.module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        return list(fx.Interpreter(phase.module).run(*(values[source.kind, source.index] for source in sources)))


def tensors(*inputs: Tensor) -> dict[tuple[str, int], Tensor]:
    """The tensor inputs of a graph, by kind and index of their sources."""
    return {("tensor", k): value for k, value in enumerate(inputs)}


def count(phase: PhaseGraph, target: Any) -> int:
    return sum(node.target is target for node in phase.module.graph.nodes)
