"""The stages of the forward, from Dynamo's graph to fused ATen operators: each is a function from a graph to a graph.

A stage can rewrite the graph that it is given in place, so nothing reads that graph afterwards. What it found, and the
reports of its fusions, are part of its result.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.devices import is_cpu
from lit_ort._compat.torch_fx import copy_nodes, graph_module_of, inputs_of, output_of, returned_by
from lit_ort.capture.capture import Captured, capture
from lit_ort.capture.layers import mark_layers
from lit_ort.capture.no_grad_views import untracked_views
from lit_ort.capture.numbers import NumberedGraph
from lit_ort.capture.recurrent_devices import refuse_recurrent_layers
from lit_ort.capture.unnoticed import unnoticed_writes
from lit_ort.fusions import fusion_pipeline as fusions
from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.options import BF16_MIXED, FLOAT32, LAYERS, TRUE_PRECISIONS, ORTOptions
from lit_ort.runtime.program import Output
from lit_ort.runtime.report import PassReport


@dataclasses.dataclass(frozen=True)
class Computed:
    """An output of Dynamo's graph that is computed.

    Args:
        position: of its value among the outputs of the captured graph.
        example: Dynamo's example of it, or None.
    """

    position: int
    example: Any

    @property
    def requires_grad(self) -> bool:
        """Whether it can receive a gradient."""
        return isinstance(self.example, torch.Tensor) and self.example.requires_grad


@dataclasses.dataclass(frozen=True)
class CapturedForward:
    """Dynamo's graph in ATen operators.

    Args:
        captured: the graph, which returns each computed tensor once.
        outputs: every output of Dynamo's graph.
        differentiable: the positions of the outputs of the captured graph that can receive a gradient.
        untracked: the positions of those that are views created under `no_grad`.
        unnoticed: the positions of the inputs that the graph changes in a way that autograd doesn't notice.
        operators: counts of its operators.
    """

    captured: Captured
    outputs: tuple[Output | Computed, ...]
    differentiable: tuple[int, ...]
    untracked: frozenset[int]
    unnoticed: frozenset[int]
    operators: dict[str, int]


@dataclasses.dataclass(frozen=True)
class FusedForward:
    """A captured graph with one operator for each pattern.

    Args:
        captured: the graph. If an operator draws from the seed of the run, the seed is another input.
        is_rewritten: whether fusions ran; they are for ATen operators on the CPU.
        precisions: the precisions of its regions of autocast.
        seeded: whether an operator draws from the seed.
        reports: of the fusions, in order.
    """

    captured: Captured
    is_rewritten: bool
    precisions: frozenset[str]
    seeded: bool
    reports: tuple[PassReport, ...]


def capture_forward(
    graph: NumberedGraph, tensors: Sequence[torch.Tensor], keys: Sequence[Any], any_sizes: bool
) -> CapturedForward:
    """Captures a graph for the dtypes and shapes of one call.

    Args:
        graph: Dynamo's graph, with its numbers separated; it is copied.
        tensors, keys: the inputs of one call.
        any_sizes: keep the sizes symbolic that Dynamo made symbolic.

    Raises:
        CaptureError: see `capture`.
    """
    trimmed, outputs = _trimmed(graph)
    captured = capture(trimmed, tensors, keys, any_sizes)
    positions = _return_once(captured.module)
    outputs = [
        dataclasses.replace(output, position=positions[output.position]) if isinstance(output, Computed) else output
        for output in outputs
    ]
    differentiable = {o.position for o in outputs if isinstance(o, Computed) and o.requires_grad}
    captured_graph = captured.module.graph
    return CapturedForward(
        captured=captured,
        outputs=tuple(outputs),
        differentiable=tuple(sorted(differentiable)),
        untracked=untracked_views(captured_graph),
        unnoticed=unnoticed_writes(captured_graph, captured.examples.tensors),
        operators=_counts(captured_graph),
    )


def fuse_forward(captured: Captured, options: ORTOptions, device: torch.device) -> FusedForward:
    """Runs the fusions on a captured graph, in place.

    Raises:
        CaptureError: a recurrent layer can't be traced on this device.
    """
    if not is_cpu(device):
        refuse_recurrent_layers(captured.module.graph, device)
    if not captured.fusible or not is_cpu(device):
        precision = BF16_MIXED if torch.is_autocast_enabled(device.type) else FLOAT32
        return FusedForward(captured, False, frozenset({precision}), False, ())
    graph = FusionGraph(captured)
    precisions = _precisions_of(graph, captured.examples.tensors)
    reports = fusions.apply(graph, options.disable_passes)
    if options.recompute == LAYERS:
        reports += (_layers_report(mark_layers(graph.graph)),)
    return FusedForward(Captured(graph.module, graph.examples, True), True, precisions, graph.seeded, reports)


def _trimmed(graph: NumberedGraph) -> tuple[NumberedGraph, list[Output | Computed]]:
    """A copy of a graph that returns each computed tensor once, and every output of the graph in terms of it."""
    copied = fx.Graph()
    returned = copy_nodes(graph.module.graph, copied, {})
    inputs = inputs_of(copied)
    nodes: list[fx.Node] = []
    outputs: list[Output | Computed] = []
    numbers = iter(range(len(graph.returned)))
    for position, value in enumerate(returned):
        if position in graph.returned:
            outputs.append(Output("number", next(numbers)))
        elif not isinstance(value, fx.Node):
            outputs.append(Output("constant", value=value))
        elif value.op == "placeholder":
            outputs.append(Output("input", inputs.index(value)))
        else:
            if value not in nodes:
                nodes.append(value)
            outputs.append(Computed(nodes.index(value), value.meta.get("example_value")))
    copied.output(tuple(nodes))
    return dataclasses.replace(graph, module=graph_module_of(graph.module, copied)), outputs


def _return_once(module: fx.GraphModule) -> list[int]:
    """Changes a captured graph to return each tensor once, although `broadcast_tensors`, `contiguous` and others can
    return their argument itself.

    Returns:
        for each output, its position among the remaining ones.
    """
    returned = returned_by(module.graph)
    nodes = list(dict.fromkeys(returned))
    output_of(module.graph).args = (tuple(nodes),)
    module.recompile()
    return [nodes.index(node) for node in returned]


def _counts(graph: fx.Graph) -> dict[str, int]:
    names = (str(node.target) for node in graph.nodes if node.op in ("call_function", "call_method"))
    return dict(collections.Counter(names).most_common())


def _precisions_of(graph: FusionGraph, inputs: Sequence[torch.Tensor]) -> frozenset[str]:
    """The precisions of the regions of autocast in a graph, and around it."""
    is_low = {
        graph.low_precision(node)
        for node in graph.graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    }
    low = frozenset({BF16_MIXED} if True in is_low else ())
    if is_low == {True}:
        return low
    dtypes = {tensor.dtype for tensor in inputs if tensor.is_floating_point()} or {torch.float32}
    return low | {TRUE_PRECISIONS.get(dtype, FLOAT32) for dtype in dtypes}


def _layers_report(layers: int) -> PassReport:
    reason = "recompute='layers': no operator belongs to a module in a list, such as encoder.layers.3"
    return PassReport("recompute", layers, () if layers else (reason,))
