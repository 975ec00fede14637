"""The stages of forward and backward, from a fused graph to phases: each is a function from a graph to a graph.

A stage can rewrite the graph that it is given in place, so nothing reads that graph afterwards. What it found, and the
reports of its passes, are part of its result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from lit_ort._compat.torch_fx import example_of, inputs_of, returned_by
from lit_ort.backend.forward_stages import CapturedForward, Computed
from lit_ort.capture.capture import Captured
from lit_ort.capture.inlined_checkpoints import has_checkpoints
from lit_ort.capture.input_sources import SOURCE
from lit_ort.capture.symbolic_terms import SymbolSources
from lit_ort.joint.aliases import name_bases, require_distinct_elements, share_memory
from lit_ort.joint.kinds import detach_others, loss_position
from lit_ort.joint.outputs import normalize_outputs
from lit_ort.joint.phases import PhaseGraph, one_phase, two_phases
from lit_ort.joint.trace import JointGraph, trace
from lit_ort.options import ORTOptions
from lit_ort.passes import optimizer_updates
from lit_ort.passes import pass_pipeline as passes
from lit_ort.passes.optimizer_updates import hand_over_gradients
from lit_ort.passes.streams import number_streams
from lit_ort.runtime.program import FORWARD, FUSED, SPLIT, UNNOTICED, Form, Mutation, Output
from lit_ort.runtime.report import PassReport


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A joint graph that returns only what sessions have to compute.

    Args:
        kind: `FUSED`, `SPLIT` or `FORWARD`.
        joint: the graph.
        outputs: how each output of the captured graph is obtained.
        mutations: the inputs that the graph changes in place.
        loss: for `FUSED`, the position of the loss among the results.
        seeded: whether one of torch's dropouts draws from the seed.
    """

    kind: str
    joint: JointGraph
    outputs: tuple[Output, ...]
    mutations: tuple[Mutation, ...]
    loss: int | None
    seeded: bool


@dataclasses.dataclass(frozen=True)
class OptimizedPhases:
    """The graphs that become sessions.

    Args:
        graphs: the forward or fused graph, and the backward of a split one.
        reports: of the passes over each of them, in order.
    """

    graphs: tuple[PhaseGraph, ...]
    reports: tuple[PassReport, ...]


def loss_output(module: fx.GraphModule, forward: CapturedForward, form: Form | None) -> int | None:
    """The position of the loss among the outputs of the captured graph; None for a graph that is not fused.

    Args:
        module: the fused graph.
        forward: what is known of its outputs.
        form: the form that was called for, or None.
    """
    if form is None:
        return loss_position(module, forward.differentiable)
    if form.loss is None:
        return None
    output = forward.outputs[form.loss]
    assert isinstance(output, Computed), "the loss is computed"
    return output.position


def joint_graph(captured: Captured, differentiable: Sequence[int], loss: int | None) -> JointGraph:
    """Traces forward and backward of a graph.

    Args:
        captured: the graph.
        differentiable: the positions of its outputs that can receive a gradient.
        loss: the position of the only one for which there is a backward, or None.

    Raises:
        CaptureError: see `trace` and `require_distinct_elements`.
    """
    require_distinct_elements(captured.module, differentiable)
    if loss is None:
        module = name_bases(captured.module, differentiable)
    else:
        module = detach_others(captured.module, differentiable, loss)
    return share_memory(trace(module, captured.examples), differentiable)


def step_graph(
    joint: JointGraph, forward: CapturedForward, fused: Captured, loss: int | None, sources: SymbolSources
) -> StepGraph:
    """Removes from a joint graph, in place, what sessions don't return, and numbers the operators that draw.

    Args:
        joint: the joint graph.
        forward: what is known of the outputs and inputs of the captured graph.
        fused: the graph that was traced.
        loss: the position of the loss among its outputs, or None.
        sources: the input and dimension of each symbolic size.

    Raises:
        CaptureError: an output can't be returned by a session.
    """
    values = [example_of(node) for node in returned_by(fused.module.graph)]
    returned = normalize_outputs(joint, fused.examples.tensors, values, sources)
    kind = FORWARD if not joint.differentiable else SPLIT if loss is None else FUSED
    seeded = number_streams(returned.joint.module)
    return StepGraph(
        kind=kind,
        joint=returned.joint,
        outputs=tuple(
            dataclasses.replace(output, untracked=k in forward.untracked) for k, output in enumerate(returned.outputs)
        ),
        mutations=tuple(
            dataclasses.replace(mutation, mode=UNNOTICED) if mutation.input in forward.unnoticed else mutation
            for mutation in returned.mutations
        ),
        loss=_result_of(returned.joint, loss) if kind == FUSED else None,
        seeded=seeded,
    )


def optimized_phases(step: StepGraph, options: ORTOptions, device: torch.device) -> OptimizedPhases:
    """Divides a joint graph into phases, and runs the passes on each."""
    budget = options.recompute if isinstance(options.recompute, float) else None
    if step.kind == SPLIT:
        graphs = two_phases(step.joint, budget)
    else:
        graphs = (one_phase(step.joint, step.loss, budget, has_checkpoints(step.joint.module)),)
    reports = [report for graph in graphs for report in passes.apply(graph.module, options.disable_passes, device)]
    if options.optimizer_in_graph and step.kind == FUSED:
        module = graphs[0].module
        fired = hand_over_gradients(module, graphs[0].results, _owners(module, step.joint.gradients))
        reports.append(PassReport(optimizer_updates.NAME, fired))
    return OptimizedPhases(graphs, tuple(reports))


def _result_of(joint: JointGraph, output: int | None) -> int:
    """The position of an output of the captured graph among the results."""
    return next(k for k, result in enumerate(joint.results) if result.kind == "output" and result.index == output)


def _owners(module: fx.GraphModule, gradients: Sequence[int]) -> list[fx.Node]:
    """The inputs of a phase to which its gradients belong."""
    tensors = [node for node in inputs_of(module.graph) if node.meta[SOURCE].kind == "tensor"]
    inputs = {node.meta[SOURCE].index: node for node in tensors}
    return [inputs[position] for position in gradients]
