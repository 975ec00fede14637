"""The models of a graph's phases for readers, with the names of the module's parameters and of the graph's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from lit_ort.backend.joint_stages import StepGraph
from lit_ort.capture.input_sources import SEED
from lit_ort.capture.symbolic_terms import SymbolSources
from lit_ort.joint.phases import PhaseGraph
from lit_ort.lower.lower import Lowered
from lit_ort.lower.readable_model import readable


def readable_models(
    step: StepGraph,
    phases: Sequence[PhaseGraph],
    lowered: Sequence[Lowered],
    inputs: Sequence[str],
    sources: SymbolSources,
) -> list[onnx.ModelProto]:
    """The model of each phase for readers; the last one returns the gradients after its results.

    Args:
        step: the joint graph.
        phases: its phases.
        lowered: what each was lowered to.
        inputs: the names of the tensor inputs.
        sources: the input and dimension of each symbolic size.
    """
    symbols = {str(symbol): f"{inputs[k]}.shape[{axis}]" for symbol, (k, axis) in sources.items()}
    gradients = [f"{inputs[owner]}.grad" for owner in step.joint.gradients]
    models: list[onnx.ModelProto] = []
    for graph, part in zip(phases, lowered, strict=True):
        results = [f"result_{k}" if k != step.loss else "loss" for k in range(graph.results)]
        outputs = [*results, *gradients] if graph is phases[-1] else results
        models.append(_readable_model(graph, part, inputs, outputs, symbols))
    return models


def _readable_model(
    graph: PhaseGraph,
    lowered: Lowered,
    inputs: Sequence[str],
    outputs: Sequence[str],
    symbols: Mapping[str, str],
) -> onnx.ModelProto:
    """The model of a phase; the sessions of other than native phases have it as it is."""
    phase = lowered.phase
    if not phase.is_native:
        return lowered.model
    names = {name: inputs[source.index] for name, source in phase.inputs if source.kind == "tensor"}
    names |= {name: SEED.kind for name, source in phase.inputs if source == SEED}
    names |= zip(phase.outputs, outputs, strict=False)
    return readable(lowered.model, graph.module.graph, phase, names, symbols)
