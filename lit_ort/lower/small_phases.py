"""Phases of a few torch operators, which run without a session: calling one would take longer than the operators."""

from __future__ import annotations

import dataclasses

import onnx

from lit_ort.runtime.program import Phase

# A session adds about 60 µs to a call, and an operator of a small graph takes 2 to 3 µs (Intel Xeon, one thread).
MOST_OPERATORS = 16


def without_session(phase: Phase, model: onnx.ModelProto) -> Phase:
    """The phase without a model if it is one torch node of few operators that reads nothing but inputs.

    Args:
        phase: any phase.
        model: its model.
    """
    if len(model.graph.node) != 1 or len(phase.nodes) != 1 or len(phase.nodes[0].statements) > MOST_OPERATORS:
        return phase
    (call,), (node,), sources = model.graph.node, phase.nodes, dict(phase.inputs)
    if len(set(call.input)) < len(call.input) or not sources.keys() >= set(call.input):
        return phase
    order = [list(call.output).index(name) for name in phase.outputs]
    outputs, forms = (tuple(values[k] for k in order) for values in (node.outputs, node.forms))
    return dataclasses.replace(
        phase,
        model=b"",
        nodes=(dataclasses.replace(node, outputs=outputs, forms=forms),),
        inputs=tuple((name, sources[name]) for name in call.input),
    )
