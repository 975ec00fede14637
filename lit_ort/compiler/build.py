"""An FX graph through every stage to its training model: capture, convert, gradient, passes.

Apart from `backend`, because what these stages import takes as long as a small graph, and a graph that comes from the
cache needs none of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch.export import ExportedProgram

from lit_ort.compiler import passes
from lit_ort.compiler.autocast import ambient_precision
from lit_ort.compiler.capture import capture
from lit_ort.compiler.convert import convert
from lit_ort.compiler.gradient import forward_only, fused_gradient, split_gradient
from lit_ort.compiler.liveness import peak_bytes
from lit_ort.compiler.passes.recompute import Recompute
from lit_ort.compiler.regions import close_regions, mark_layers
from lit_ort.compiler.signature import Compilation, StepSignature, TrainingModel, describe, tensors_of
from lit_ort.compiler.sizes import conditions_of, remember_examples
from lit_ort.compiler.support import require_independent_draws, unproven
from lit_ort.compiler.torch_calls import Target, count_calls, family_of, target_of, targets_of, untranslated
from lit_ort.errors import ConvertError
from lit_ort.inspect import GraphReport, PassReport, count_operators, dump
from lit_ort.options import LAYERS, ORTOptions


def build(
    graph_module: fx.GraphModule, arguments: Sequence[Any], options: ORTOptions, name: str, any_sizes: bool = False
) -> Compilation:
    """Takes a graph through capture, convert, gradient and passes.

    Args:
        any_sizes: for whatever sizes the conditions of its signature allow, instead of those of `arguments`.

    Raises:
        CompileError: with the stage's own class, what keeps the graph from ONNX Runtime.
    """
    found = _forward(graph_module, arguments, options, name, any_sizes)
    model, signature, reports = found.model, found.signature, found.reports
    kind = kind_of(model, signature)
    precise = not signature.bf16
    close_regions(model)
    training = _add_gradient(model, signature, kind)
    dump(training.model, options.dump_dir, name, "3_gradient")
    after = passes.TRAINING_PASSES if precise else (*passes.TRAINING_PASSES, *passes.TRAINING_PRECISION_PASSES)
    updates = passes.UPDATE_PASSES if options.optimizer_in_graph and kind == "fused" else ()
    last = (*passes.MEMORY_PASSES, *updates, *passes.ORDER_PASSES)
    reports += passes.apply((*after, *last), training.model, options.disable_passes)
    dump(training.model, options.dump_dir, name, "4_training_passes")
    if found.layers == 0:
        reports = tuple(map(_without_layers, reports))
    require_independent_draws(training.model)
    report = GraphReport(
        name=name,
        kind=kind,
        inputs=len(signature.input_names),
        wants_gradient=len(signature.wants_gradient),
        shapes=_data_shapes(signature, tensors_of(arguments), training.model),
        operators_before=found.operators,
        operators_after=count_operators(training.model),
        passes=reports,
        seconds=0.0,
        precision=" and ".join(sorted(signature.precisions)),
        peak_bytes=peak_bytes(training.model.graph),
        torch_operators=count_calls(training.model),
    )
    return Compilation(signature, kind, training, report)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """A forward model whose gradients are proven, or are torch's."""

    model: ir.Model
    signature: StepSignature
    reports: tuple[PassReport, ...]
    operators: dict[str, int]
    layers: int | None


def _forward(
    graph_module: fx.GraphModule, arguments: Sequence[Any], options: ORTOptions, name: str, any_sizes: bool
) -> _Forward:
    """Captures and converts a graph, again with torch's own operators where gradients turn out not to be proven."""
    precision = ambient_precision(options.precision)
    calls: frozenset[Target] = frozenset()
    while True:
        with torch.autocast("cpu", enabled=False):
            captured = capture(graph_module, arguments, precision, calls, any_sizes)
            try:
                model = convert(captured)
            except ConvertError as error:
                refused = {target for target in targets_of(captured.program) if str(target) == error.operator}
                more = (refused or untranslated(captured.program)) - calls
                if not more:
                    raise
                calls |= more
                continue
        signature = captured.signature
        if any_sizes:
            signature = dataclasses.replace(signature, sizes=conditions_of(captured.program))
            remember_examples(model.graph, captured.sizes)
        dump(model, options.dump_dir, name, "1_forward")
        operators = count_operators(model)
        layers = mark_layers(model) if options.recompute == LAYERS else None
        chosen = passes.FORWARD_PASSES
        chosen = (*chosen, *passes.FORWARD_PRECISION_PASSES) if signature.bf16 else chosen
        reports = passes.apply(chosen, model, options.disable_passes)
        dump(model, options.dump_dir, name, "2_forward_passes")
        more = _needed_calls(captured.program, model, signature) - calls
        if not more:
            return _Forward(model, signature, reports, operators, layers)
        calls |= more


def _needed_calls(program: ExportedProgram, model: ir.Model, signature: StepSignature) -> frozenset[Target]:
    """The operators of a program that have to be calls; where a node's own is none of them, it is part of one."""
    nodes = [node for node, _ in unproven(model, signature)]
    # Loops and branches, into which the gradient builder doesn't see.
    nodes += [node for node in model.graph if any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())]
    own = {target: family_of(target) for target in targets_of(program)}
    names = {name for node in nodes for name in _families(node, own.values())}
    known = frozenset(target for target, name in own.items() if name in names)
    return known if names <= set(own.values()) else known | untranslated(program)


# Nodes that the exporter's optimizer makes of several, and which forgot where they come from.
_MERGED = {"Split": frozenset({"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind"})}


def _families(node: ir.Node, present: Collection[str]) -> Iterable[str | None]:
    """What the operator is called that a node was translated from; None where nothing tells."""
    target = target_of(node)
    if target is not None:
        return (target.rpartition(".")[0],)
    return _MERGED.get(node.op_type, frozenset()).intersection(present) or (None,)


def kind_of(model: ir.Model, signature: StepSignature) -> str:
    """`forward` without gradients, `fused` for one differentiable scalar, `split` for anything else."""
    if not signature.wants_gradient:
        return "forward"
    differentiable = [k for k, wants in enumerate(signature.result_differentiable) if wants]
    shape = model.graph.outputs[differentiable[0]].shape
    return "fused" if len(differentiable) == 1 and shape is not None and len(shape) == 0 else "split"


def _without_layers(report: PassReport) -> PassReport:
    """Says why nothing is recomputed where `recompute="layers"` found none."""
    reason = "recompute='layers': no operator belongs to a module in a list, such as encoder.layers.3"
    return dataclasses.replace(report, declined=(*report.declined, reason)) if report.name == Recompute.name else report


def _add_gradient(model: ir.Model, signature: StepSignature, kind: str) -> TrainingModel:
    if kind == "forward":
        return forward_only(model)
    return fused_gradient(model, signature) if kind == "fused" else split_gradient(model, signature)


def _data_shapes(signature: StepSignature, tensors: Sequence[torch.Tensor], model: ir.Model) -> tuple[str, ...]:
    """The inputs that are neither parameters nor buffers, whose names are paths."""
    shapes = {value.name: value.shape for value in model.graph.inputs}
    return tuple(
        describe(name, tensor, shapes.get(name))
        for k, (name, tensor) in enumerate(zip(signature.input_names, tensors, strict=True))
        if k not in signature.wants_gradient and "." not in name
    )
