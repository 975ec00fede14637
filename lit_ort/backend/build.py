"""Builds a program from an FX graph, stage by stage: capture, fusions, joint graph, passes, lowering.

This module is separate from `backend` because the imports of the stages take as long as building a small graph, and a
graph from the cache needs none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lit_ort._compat.devices import device_of
from lit_ort.backend.compilation import Compilation, others_as_compile_errors
from lit_ort.backend.dump import Dump
from lit_ort.backend.forward_stages import capture_forward, fuse_forward
from lit_ort.backend.graph_report import report_of
from lit_ort.backend.graph_signature import signature_of
from lit_ort.backend.joint_stages import joint_graph, loss_output, optimized_phases, step_graph
from lit_ort.backend.readable_phases import readable_models
from lit_ort.capture.names import input_names
from lit_ort.capture.numbers import NumberedGraph
from lit_ort.capture.symbolic_terms import symbol_sources
from lit_ort.errors import CaptureError
from lit_ort.fusions import fusion_pipeline as fusions
from lit_ort.lower.lower import Lowered, lower
from lit_ort.options import ORTOptions
from lit_ort.passes import pass_pipeline as passes
from lit_ort.runtime.engines.engine_interface import Engine
from lit_ort.runtime.program import Form, Program

# The names of the files of each phase.
_PHASES = ("4_forward", "5_backward")


@others_as_compile_errors()
def build(
    graph: NumberedGraph,
    tensors: Sequence[torch.Tensor],
    keys: Sequence[Any],
    options: ORTOptions,
    name: str,
    engine: Engine,
    *,
    any_sizes: bool = False,
    form: Form | None = None,
) -> Compilation:
    """Runs all stages on a graph.

    Args:
        graph: Dynamo's graph, with its numbers separated.
        tensors, keys: the inputs of one call.
        options: all options of the engine.
        name: the graph's name in reports.
        engine: the build of ONNX Runtime that will run it.
        any_sizes: compile for all sizes that the conditions of the signature allow, not only for those of `tensors`.
        form: the form that gradients of earlier runs called for; None for the one that the graph's outputs suggest.

    Raises:
        CompileError: the graph can't run through ONNX Runtime; each stage raises its own subclass. Any other exception
            of torch or of the lowering is its cause.
    """
    device = device_of(tensors)
    _require_device(engine, device)
    dump = Dump(options.dump_dir, name)
    names = input_names(graph.module, len(tensors))
    forward = capture_forward(graph, tensors, keys, any_sizes)
    dump.graph("1_captured", forward.captured.module)
    fused = fuse_forward(forward.captured, options, device)
    if fused.is_rewritten:
        dump.graph("2_fused", fused.captured.module)
    sources = symbol_sources(fused.captured.examples)
    loss = loss_output(fused.captured.module, forward, form)
    joint = joint_graph(fused.captured, forward.differentiable, loss)
    dump.graph("3_joint", joint.module)
    step = step_graph(joint, forward, fused.captured, loss, sources)
    phases = optimized_phases(step, options, device)
    lowered: list[Lowered] = []
    for label, phase in zip(_PHASES, phases.graphs, strict=False):
        dump.graph(label, phase.module)
        lowered.append(lower(phase, sources, name, engine.keeps_order, device, engine.native))
    if options.dump_dir is not None:
        for label, model in zip(_PHASES, readable_models(step, phases.graphs, lowered, names, sources), strict=False):
            dump.model(label, model)
    signature = signature_of(names, forward, fused, step, phases.graphs, any_sizes)
    program = Program(step.kind, signature, *(part.phase for part in lowered))
    reports = (*fused.reports, *phases.reports)
    return Compilation(program, report_of(name, program, tensors, device, forward, phases.graphs, lowered, reports))


def require_pass_names(disabled: Sequence[str]) -> None:
    """Checks `disable_passes`.

    Raises:
        OptionsError: an unknown name, or a pass that every graph needs.
    """
    passes.require_names(disabled, fusions.names(), fusions.required_names())


def _require_device(engine: Engine, device: torch.device) -> None:
    if device.type not in engine.device_types:
        raise CaptureError(
            f"its tensors are on {device}, but engine={engine.name!r} computes on the CPU",
            remedy="Train with accelerator='cpu', or install stock onnxruntime, see docs/engines.md.",
        )
