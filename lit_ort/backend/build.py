"""Builds a program from an FX graph, stage by stage: capture, fusions, joint graph, passes, lowering.

This module is separate from `backend` because the imports of the stages take as long as building a small graph, and a
graph from the cache needs none of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx
import torch
from torch import fx

from lit_ort._compat.devices import device_of, is_cpu
from lit_ort._compat.torch_fx import copy_nodes, example_of, inputs_of, output_of, returned_by
from lit_ort.backend.compilation import Compilation, others_as_compile_errors
from lit_ort.backend.dump import Dump
from lit_ort.backend.slow_reason import expected_speed
from lit_ort.capture.capture import Captured, capture
from lit_ort.capture.dimensions import Dimensions
from lit_ort.capture.inlined_checkpoints import has_checkpoints
from lit_ort.capture.layers import mark_layers
from lit_ort.capture.names import input_names
from lit_ort.capture.no_grad_views import untracked_views
from lit_ort.capture.numbers import NumberedGraph
from lit_ort.capture.recurrent_devices import refuse_recurrent_layers
from lit_ort.capture.symbolic_terms import SymbolSources, conditions_of, symbol_sources
from lit_ort.capture.unnoticed import unnoticed_writes
from lit_ort.errors import CaptureError
from lit_ort.fusions import fusion_pipeline as fusions
from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.joint.aliases import name_bases, require_distinct_elements, share_memory
from lit_ort.joint.kinds import detach_others, loss_position
from lit_ort.joint.outputs import Returned, normalize_outputs
from lit_ort.joint.phases import (
    SOURCE,
    PhaseGraph,
    inputs_of_backward,
    one_phase,
    results_of_gradients,
    saved_inputs,
    two_phases,
)
from lit_ort.joint.trace import trace
from lit_ort.lower.lower import Lowered, lower
from lit_ort.lower.model import LEAF
from lit_ort.lower.planned_memory import peak_bytes
from lit_ort.lower.readable_model import readable
from lit_ort.ops.region_operator import REGION_NAME
from lit_ort.options import BF16_MIXED, FLOAT32, LAYERS, TRUE_PRECISIONS, ORTOptions
from lit_ort.passes import optimizer_updates
from lit_ort.passes import pass_pipeline as passes
from lit_ort.passes.optimizer_updates import hand_over_gradients
from lit_ort.passes.streams import number_streams
from lit_ort.regions.placed_region import from_json
from lit_ort.runtime.engines.engine_interface import Engine
from lit_ort.runtime.program import FORWARD, FUSED, SPLIT, TRACKED, UNNOTICED, Form, Output, Program, Signature, Source
from lit_ort.runtime.report import GraphReport, PassReport, describe


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
    with others_as_compile_errors():
        return _Build(graph, tensors, keys, options, name, engine, any_sizes, form).run()


def require_pass_names(disabled: Sequence[str]) -> None:
    """Checks `disable_passes`.

    Raises:
        OptionsError: an unknown name, or a pass that every graph needs.
    """
    passes.require_names(disabled, fusions.names(), fusions.required_names())


class _Build:
    """The build of one graph; every stage is a method."""

    def __init__(
        self,
        graph: NumberedGraph,
        tensors: Sequence[torch.Tensor],
        keys: Sequence[Any],
        options: ORTOptions,
        name: str,
        engine: Engine,
        any_sizes: bool,
        form: Form | None,
    ) -> None:
        self._engine = engine
        self._graph, self._tensors, self._keys = graph, tensors, keys
        self._device = device_of(tensors)
        self._options, self._name = options, name
        self._dump = Dump(options.dump_dir, name)
        self._any_sizes, self._form = any_sizes, form
        self._changing: Dimensions = {}
        self._reports: tuple[PassReport, ...] = ()

    def run(self) -> Compilation:
        self._require_device()
        trimmed, outputs, differentiable = _trimmed(self._graph)
        captured = capture(trimmed, self._tensors, self._keys, self._any_sizes)
        positions = _return_once(captured.module)
        outputs = [output if isinstance(output, Output) else (positions[output[0]], output[1]) for output in outputs]
        differentiable = sorted({positions[k] for k in differentiable})
        self._changing = captured.examples.changing
        untracked = untracked_views(captured.module.graph)
        unnoticed = unnoticed_writes(captured.module.graph, captured.examples.tensors)
        before = _counts(captured.module.graph)
        self._dump.graph("1_captured", captured.module)
        captured, precisions, seeded = self._fused(captured)
        sources = symbol_sources(captured.examples)
        require_distinct_elements(captured.module, differentiable)
        loss = self._loss(captured.module, differentiable, outputs)
        if loss is None:
            module = name_bases(captured.module, differentiable)
        else:
            module = detach_others(captured.module, differentiable, loss)
        joint = share_memory(trace(module, captured.examples), differentiable)
        self._dump.graph("3_joint", joint.module)
        inputs, values = captured.examples.tensors, [example_of(node) for node in returned_by(captured.module.graph)]
        returned = normalize_outputs(joint, inputs, values, sources)
        mutations = [dataclasses.replace(m, mode=UNNOTICED) if m.input in unnoticed else m for m in returned.mutations]
        returned = dataclasses.replace(returned, mutations=tuple(mutations))
        computed = [dataclasses.replace(o, untracked=k in untracked) for k, o in enumerate(returned.outputs)]
        kind = FORWARD if not returned.joint.differentiable else SPLIT if loss is None else FUSED
        seeded |= number_streams(returned.joint.module)
        phases, loss_result = self._phases(kind, returned, loss)
        lowered = [self._lowered(k, phase, sources) for k, phase in enumerate(phases)]
        if self._options.dump_dir is not None:
            for k, (phase, one) in enumerate(zip(phases, lowered, strict=True)):
                owners = returned.joint.gradients if k == len(phases) - 1 else ()
                self._dump.model(_label(k), self._readable(phase, one, owners, loss_result, sources))
        signature = self._signature(
            returned, phases, _all_outputs(outputs, computed, returned.joint.tangents), differentiable, loss_result
        )
        signature = dataclasses.replace(
            signature,
            precisions=precisions,
            sizes=conditions_of(captured.examples) if self._any_sizes else None,
            seeded=seeded,
            grad_mode=joint.grad_mode,
        )
        program = Program(kind, signature, lowered[0].phase, lowered[1].phase if len(lowered) > 1 else None)
        return Compilation(program, self._report(program, phases, lowered, before))

    def _loss(self, module: fx.GraphModule, differentiable: Sequence[int], outputs: Sequence[Any]) -> int | None:
        """The position of the loss among the results; None for a graph that is not fused."""
        if self._form is None:
            return loss_position(module, differentiable)
        return None if self._form.loss is None else outputs[self._form.loss][0]

    def _require_device(self) -> None:
        if self._device.type not in self._engine.device_types:
            raise CaptureError(
                f"its tensors are on {self._device}, but engine={self._engine.name!r} computes on the CPU",
                remedy="Train with accelerator='cpu', or install stock onnxruntime, see docs/engines.md.",
            )

    def _fused(self, captured: Captured) -> tuple[Captured, frozenset[str], bool]:
        low = torch.is_autocast_enabled(self._device.type)
        if not is_cpu(self._device):
            refuse_recurrent_layers(captured.module.graph, self._device)
        if not captured.fusible or not is_cpu(self._device):
            return captured, frozenset({BF16_MIXED if low else FLOAT32}), False
        graph = FusionGraph(captured)
        is_low = {
            graph.low_precision(node)
            for node in graph.graph.nodes
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
        }
        precisions = frozenset[str]() if is_low == {True} else _precisions_of(captured.examples.tensors)
        if True in is_low:
            precisions |= {BF16_MIXED}
        self._reports += fusions.apply(graph, self._options.disable_passes)
        if self._options.recompute == LAYERS:
            self._reports += (_layers_report(mark_layers(graph.graph)),)
        self._dump.graph("2_fused", graph.module)
        return Captured(graph.module, graph.examples, True), precisions, graph.seeded

    def _phases(self, kind: str, returned: Returned, loss: int | None) -> tuple[list[PhaseGraph], int | None]:
        joint = returned.joint
        result = None
        if kind == FUSED:
            result = next(k for k, r in enumerate(joint.results) if r.kind == "output" and r.index == loss)
        recomputes = has_checkpoints(joint.module)
        budget = self._options.recompute if isinstance(self._options.recompute, float) else None
        phases = list(two_phases(joint, budget)) if kind == SPLIT else [one_phase(joint, result, budget, recomputes)]
        count = len(self._tensors)
        for phase in phases:
            self._reports += passes.apply(phase.module, self._options.disable_passes, self._device)
            _name_seed(phase.module, count)
        if self._options.optimizer_in_graph and kind == FUSED:
            fired = hand_over_gradients(phases[0].module, phases[0].results, _owners(phases[0].module, joint.gradients))
            self._reports += (PassReport(optimizer_updates.NAME, fired),)
        return phases, result

    def _lowered(self, position: int, phase: PhaseGraph, sources: SymbolSources) -> Lowered:
        self._dump.graph(_label(position), phase.module)
        return lower(phase, sources, self._name, self._engine.keeps_order, self._device, self._engine.native)

    def _readable(
        self,
        graph: PhaseGraph,
        lowered: Lowered,
        owners: Sequence[int],
        loss: int | None,
        sources: SymbolSources,
    ) -> onnx.ModelProto:
        """The model of a phase for readers; after its results, it returns the gradients of these inputs."""
        phase = lowered.phase
        if not phase.is_native:
            return lowered.model
        inputs = input_names(self._graph.module, len(self._tensors))
        names = {name: inputs[source.index] for name, source in phase.inputs if source.kind == "tensor"}
        names |= {name: source.kind for name, source in phase.inputs if source.kind == "seed"}
        results = [f"result_{k}" if k != loss else "loss" for k in range(graph.results)]
        gradients = [f"{inputs[owner]}.grad" for owner in owners]
        names |= zip(phase.outputs, [*results, *gradients], strict=False)
        symbols = {str(symbol): f"{inputs[k]}.shape[{axis}]" for symbol, (k, axis) in sources.items()}
        return readable(lowered.model, graph.module.graph, phase, names, symbols)

    def _signature(
        self,
        returned: Returned,
        phases: Sequence[PhaseGraph],
        outputs: tuple[Output, ...],
        differentiable: Sequence[int],
        loss: int | None,
    ) -> Signature:
        joint = returned.joint
        untracked = {mutation.result for mutation in returned.mutations if mutation.mode != TRACKED}
        tangents = set(joint.tangents) - untracked
        for position in differentiable:
            output = returned.outputs[position]
            if output.source == "result":
                tangents.add(output.index)
        tangents = tangents if joint.differentiable else set()
        gradients: list[int | None] = [None] * len(self._tensors)
        for position, owner in enumerate(joint.gradients):
            gradients[owner] = position
        # The seed is an input after these.
        unchanged = set(range(len(self._tensors))) - {mutation.input for mutation in returned.mutations}
        read = inputs_of_backward(joint) & unchanged if len(phases) == 1 else saved_inputs(phases[-1])
        return Signature(
            input_names=input_names(self._graph.module, len(self._tensors)),
            outputs=outputs,
            results=len(joint.results),
            keys=tuple((result.kind, result.index) for result in joint.results),
            differentiable=tuple(k in tangents for k in range(len(joint.results))),
            loss=loss,
            gradients=tuple(gradients),
            tangents=tuple(sorted(set(joint.tangents))),
            reached_from=results_of_gradients(joint) if len(phases) > 1 and len(joint.tangents) > 1 else (),
            mutations=returned.mutations,
            saved_inputs=tuple(sorted(read)),
        )

    def _report(
        self, program: Program, phases: Sequence[PhaseGraph], lowered: Sequence[Lowered], before: dict[str, int]
    ) -> GraphReport:
        nodes = (node for part in lowered for node in part.model.graph.node)
        after = collections.Counter(node.op_type for node in nodes if not node.name.startswith(LEAF))
        statements = [s for part in lowered for node in part.phase.nodes for s in node.statements]
        texts = collections.Counter(s.args[1] for s in statements if s.target == REGION_NAME)
        texts.update(region.text for part in lowered for region in part.phase.regions)
        regions: collections.Counter[str] = collections.Counter()
        for text, calls in texts.items():
            regions[from_json(text).region.summary] += calls
        signature = program.signature
        operators = dict(collections.Counter(s.target for s in statements).most_common())
        graphs = [phase.module.graph for phase in phases]
        is_native = all(part.phase.is_native and not part.phase.nodes for part in lowered)
        return GraphReport(
            name=self._name,
            kind=program.kind,
            inputs=len(self._tensors),
            gradient_count=sum(position is not None for position in signature.gradients),
            shapes=_data_shapes(signature, self._tensors, self._changing),
            operators_before=before,
            operators_after=dict(after.most_common()),
            passes=self._reports,
            seconds=0.0,
            precision=" and ".join(sorted(signature.precisions)),
            peak_bytes=max(
                peak_bytes(phase.module.graph, part.phase.is_native)
                for phase, part in zip(phases, lowered, strict=True)
            ),
            torch_operators=operators,
            regions=dict(regions.most_common()),
            is_small=all(not part.phase.model for part in lowered),
            is_native=is_native,
            speed=None
            if program.kind == FORWARD or is_native or not is_cpu(self._device)
            else expected_speed(graphs, operators, self._reports),
        )


def _label(position: int) -> str:
    """The name of the files of a phase."""
    return ("4_forward", "5_backward")[position]


def _trimmed(graph: NumberedGraph) -> tuple[NumberedGraph, list[Any], list[int]]:
    """A copy of a graph that returns each computed tensor once.

    Returns:
        the graph; for each output, its position among the returned tensors, or an `Output`; the positions of the
        returned tensors that require a gradient.
    """
    copied = fx.Graph()
    returned = copy_nodes(graph.module.graph, copied, {})
    inputs = inputs_of(copied)
    nodes: list[fx.Node] = []
    outputs: list[Any] = []
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
            outputs.append((nodes.index(value), value.meta.get("example_value")))
    copied.output(tuple(nodes))
    differentiable = [k for k, node in enumerate(nodes) if _requires_grad(node)]
    return dataclasses.replace(graph, module=fx.GraphModule(graph.module, copied)), outputs, differentiable


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


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _all_outputs(outputs: Sequence[Any], computed: Sequence[Output], tracked: Sequence[int]) -> tuple[Output, ...]:
    """Every output of the graph.

    Args:
        outputs: as `_trimmed` returns them.
        computed: the outputs of the trimmed graph.
        tracked: the results for which a gradient can arrive.
    """
    return tuple(
        output if isinstance(output, Output) else _as_expected(computed[output[0]], output[1], tracked)
        for output in outputs
    )


def _as_expected(output: Output, example: Any, tracked: Sequence[int]) -> Output:
    """An output with the dtype and requires_grad that Dynamo assumed when it traced the rest of the step."""
    if not isinstance(example, torch.Tensor):
        return dataclasses.replace(output, dtype=None)
    is_tracked = output.view is not None or (output.source == "result" and output.index in tracked)
    return dataclasses.replace(output, dtype=example.dtype, detached=is_tracked and not example.requires_grad)


def _layers_report(layers: int) -> PassReport:
    reason = "recompute='layers': no operator belongs to a module in a list, such as encoder.layers.3"
    return PassReport("recompute", layers, () if layers else (reason,))


def _owners(module: fx.GraphModule, gradients: Sequence[int]) -> list[fx.Node]:
    """The inputs of a phase to which its gradients belong."""
    tensors = [node for node in inputs_of(module.graph) if node.meta[SOURCE].kind == "tensor"]
    inputs = {node.meta[SOURCE].index: node for node in tensors}
    return [inputs[position] for position in gradients]


def _name_seed(module: fx.GraphModule, tensors: int) -> None:
    """Marks the input after the graph's own inputs as the seed of the run."""
    for node in inputs_of(module.graph):
        source = node.meta.get(SOURCE)
        if source is not None and source.kind == "tensor" and source.index == tensors:
            node.meta[SOURCE] = Source("seed")


def _precisions_of(tensors: Sequence[torch.Tensor]) -> frozenset[str]:
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} or {torch.float32}
    return frozenset(TRUE_PRECISIONS.get(dtype, FLOAT32) for dtype in dtypes)


def _counts(graph: fx.Graph) -> dict[str, int]:
    names = (str(node.target) for node in graph.nodes if node.op in ("call_function", "call_method"))
    return dict(collections.Counter(names).most_common())


def _data_shapes(signature: Signature, tensors: Sequence[torch.Tensor], changing: Dimensions) -> tuple[str, ...]:
    """The inputs that are neither parameters nor buffers, whose names contain a dot."""
    return tuple(
        describe(name, tensor, changing.get(position, ()))
        for position, (name, tensor) in enumerate(zip(signature.input_names, tensors, strict=True))
        if not tensor.requires_grad and "." not in name
    )
