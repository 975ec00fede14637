"""The report of a graph that was built: what it contains, what became of it, and how fast it is expected to be."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import torch

from lit_ort._compat.devices import is_cpu
from lit_ort.backend.forward_stages import CapturedForward
from lit_ort.backend.slow_reason import expected_speed
from lit_ort.capture.dimensions import Dimensions
from lit_ort.joint.phases import PhaseGraph
from lit_ort.lower.lower import Lowered
from lit_ort.lower.model import LEAF
from lit_ort.lower.planned_memory import peak_bytes
from lit_ort.ops.region_operator import REGION_NAME
from lit_ort.regions.placed_region import from_json
from lit_ort.runtime.program import FORWARD, Program, Signature, Statement
from lit_ort.runtime.report import GraphReport, PassReport, describe


def report_of(
    name: str,
    program: Program,
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    forward: CapturedForward,
    phases: Sequence[PhaseGraph],
    lowered: Sequence[Lowered],
    passes: tuple[PassReport, ...],
) -> GraphReport:
    """The report of a graph, without the seconds that it took.

    Args:
        name: the graph's name.
        program: what was built.
        tensors: the inputs of the call that it was built for.
        device: their device.
        forward: the captured graph.
        phases: its phases.
        lowered: what each was lowered to.
        passes: the reports of all fusions and passes.
    """
    nodes = (node for part in lowered for node in part.model.graph.node)
    after = collections.Counter(node.op_type for node in nodes if not node.name.startswith(LEAF))
    statements = [statement for part in lowered for node in part.phase.nodes for statement in node.statements]
    operators = dict(collections.Counter(statement.target for statement in statements).most_common())
    is_native = all(part.phase.is_native and not part.phase.nodes for part in lowered)
    has_speed = program.kind != FORWARD and not is_native and is_cpu(device)
    graphs = [phase.module.graph for phase in phases]
    peaks = [peak_bytes(graph, part.phase.is_native) for graph, part in zip(graphs, lowered, strict=True)]
    signature = program.signature
    return GraphReport(
        name=name,
        kind=program.kind,
        inputs=len(tensors),
        gradient_count=sum(position is not None for position in signature.gradients),
        shapes=_data_shapes(signature, tensors, forward.captured.examples.changing),
        operators_before=forward.operators,
        operators_after=dict(after.most_common()),
        passes=passes,
        seconds=0.0,
        precision=" and ".join(sorted(signature.precisions)),
        peak_bytes=max(peaks),
        torch_operators=operators,
        regions=_calls_of_regions(statements, lowered),
        is_small=all(not part.phase.model for part in lowered),
        is_native=is_native,
        speed=expected_speed(graphs, operators, passes) if has_speed else None,
    )


def _calls_of_regions(statements: Sequence[Statement], lowered: Sequence[Lowered]) -> dict[str, int]:
    """What each region computes, and how often a run calls it."""
    texts = collections.Counter(statement.args[1] for statement in statements if statement.target == REGION_NAME)
    texts.update(region.text for part in lowered for region in part.phase.regions)
    calls: collections.Counter[str] = collections.Counter()
    for text, count in texts.items():
        calls[from_json(text).region.summary] += count
    return dict(calls.most_common())


def _data_shapes(signature: Signature, tensors: Sequence[torch.Tensor], changing: Dimensions) -> tuple[str, ...]:
    """The inputs that are neither parameters nor buffers, whose names contain a dot."""
    return tuple(
        describe(name, tensor, changing.get(position, ()))
        for position, (name, tensor) in enumerate(zip(signature.input_names, tensors, strict=True))
        if not tensor.requires_grad and "." not in name
    )
