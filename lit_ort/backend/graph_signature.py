"""The signature of a graph: how its inputs and outputs map to what its sessions take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from lit_ort.backend.forward_stages import CapturedForward, FusedForward
from lit_ort.backend.joint_stages import StepGraph
from lit_ort.capture.symbolic_terms import conditions_of
from lit_ort.joint.phases import PhaseGraph, inputs_of_backward, results_of_gradients, saved_inputs
from lit_ort.joint.trace import JointGraph
from lit_ort.runtime.program import TRACKED, Output, Signature


def signature_of(
    names: tuple[str, ...],
    forward: CapturedForward,
    fused: FusedForward,
    step: StepGraph,
    phases: Sequence[PhaseGraph],
    any_sizes: bool,
) -> Signature:
    """The signature of a graph whose phases are lowered, since every stage can add guards on sizes.

    Args:
        names: of its tensor inputs.
        forward, fused, step, phases: the results of its stages.
        any_sizes: whether it is valid for all sizes that its guards allow.

    Raises:
        CaptureError: a guard on sizes can't be checked at run time.
    """
    joint = step.joint
    tangents = _tangents_that_arrive(forward, step)
    is_split = len(phases) > 1
    return Signature(
        input_names=names,
        outputs=_outputs(forward, step),
        results=len(joint.results),
        keys=tuple((result.kind, result.index) for result in joint.results),
        differentiable=tuple(k in tangents for k in range(len(joint.results))),
        loss=step.loss,
        gradients=_positions_of_gradients(joint, len(names)),
        tangents=tuple(sorted(set(joint.tangents))),
        reached_from=results_of_gradients(joint) if is_split and len(joint.tangents) > 1 else (),
        mutations=step.mutations,
        saved_inputs=tuple(sorted(saved_inputs(phases[-1]) if is_split else _inputs_read_unchanged(step))),
        precisions=fused.precisions,
        sizes=conditions_of(fused.captured.examples) if any_sizes else None,
        seeded=fused.seeded or step.seeded,
        grad_mode=joint.grad_mode,
    )


def _outputs(forward: CapturedForward, step: StepGraph) -> tuple[Output, ...]:
    """Every output of Dynamo's graph."""
    return tuple(
        output
        if isinstance(output, Output)
        else _as_expected(step.outputs[output.position], output.example, step.joint.tangents)
        for output in forward.outputs
    )


def _as_expected(output: Output, example: Any, tracked: Sequence[int]) -> Output:
    """An output with the dtype and requires_grad that Dynamo assumed when it traced the rest of the step.

    Args:
        output: of the captured graph.
        example: Dynamo's.
        tracked: the results for which a gradient can arrive.
    """
    if not isinstance(example, torch.Tensor):
        return dataclasses.replace(output, dtype=None)
    is_tracked = output.view is not None or (output.source == "result" and output.index in tracked)
    return dataclasses.replace(output, dtype=example.dtype, detached=is_tracked and not example.requires_grad)


def _tangents_that_arrive(forward: CapturedForward, step: StepGraph) -> set[int]:
    """The results for which autograd can pass a gradient."""
    if not step.joint.differentiable:
        return set()
    untracked = {mutation.result for mutation in step.mutations if mutation.mode != TRACKED}
    outputs = [step.outputs[position] for position in forward.differentiable]
    computed = {output.index for output in outputs if output.source == "result"}
    return (set(step.joint.tangents) - untracked) | computed


def _positions_of_gradients(joint: JointGraph, inputs: int) -> tuple[int | None, ...]:
    """For each tensor input, the position of its gradient among the computed ones, or None."""
    positions = {owner: position for position, owner in enumerate(joint.gradients)}
    return tuple(positions.get(k) for k in range(inputs))


def _inputs_read_unchanged(step: StepGraph) -> set[int]:
    """The tensor inputs that the backward of a step in one phase reads, and no operator writes."""
    return inputs_of_backward(step.joint) - {mutation.input for mutation in step.mutations}
