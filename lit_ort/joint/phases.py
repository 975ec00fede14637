"""The joint graph as what runs: one graph for a fused or forward step, two for a split one.

Source: torch's partitioners (torch._functorch.partitioners) choose what the forward saves for the backward; recomputed
activations are Chen et al. 2016, an activation memory budget the knapsack of torch's min-cut partitioner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import OF_BACKWARD, is_marked, mark_recomputed, partition
from lit_ort._compat.torch_fx import first_argument, inputs_of, output_of, returned_by
from lit_ort._compat.torch_ops import OpOverload
from lit_ort.joint.trace import JointGraph
from lit_ort.runtime.program import Source

aten = torch.ops.aten
# Views of all of a value.
_WHOLE_VIEWS = frozenset(
    {aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default}
    | {aten.unsqueeze.default, aten.expand.default, aten.squeeze.dim, aten.squeeze.dims, aten.detach.default}
)
_SAVED = "lit_ort_saved"
# What a node of a backward carries.
SOURCE = "lit_ort_source"


@dataclasses.dataclass(frozen=True)
class PhaseGraph:
    """One graph that becomes a session.

    Args:
        module: each input has its `Source` in `meta[SOURCE]`; the outputs are those of the session.
        results: how many of the outputs are results, before saved values or gradients.
    """

    module: fx.GraphModule
    results: int


def one_phase(joint: JointGraph, loss: int | None, budget: float | None, recomputes: bool) -> PhaseGraph:
    """A graph that gives results and gradients in one run, for a gradient of one of the loss and none of the others.

    Args:
        loss: the result that is the loss; None without gradients.
        budget: activation memory between 0 and 1, or None.
        recomputes: whether nodes are marked to be computed again in the backward.
    """
    module = joint.module
    if loss is not None and (recomputes or budget is not None):
        forward, backward = partition(module, len(joint.results), budget)
        module = _stitched(forward, backward, len(joint.results))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    tangents = dict(zip(_tangents(joint.module), joint.tangents, strict=True))
    for node in module.graph.nodes:
        description = node.meta.get("described")
        if node.op == "placeholder" and node.name in tangents:
            value = node.meta["val"]
            fill = 1.0 if tangents[node.name] == loss else 0.0
            kwargs = {"dtype": value.dtype, "device": value.device}
            copies[node] = graph.call_function(aten.full.default, (list(value.shape), fill), kwargs)
            copies[node].meta = {**OF_BACKWARD, "val": value}
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "placeholder":
                copies[node].meta[SOURCE] = Source("tensor", description.index)
    return PhaseGraph(fx.GraphModule(module, graph), len(joint.results))


def two_phases(joint: JointGraph, budget: float | None) -> tuple[PhaseGraph, PhaseGraph]:
    """The forward, which also gives what the backward needs, and the backward."""
    results = len(joint.results)
    forward, backward = partition(joint.module, results, budget)
    _save_bases(forward.graph, backward.graph, results)
    described = {node.name: node.meta["described"] for node in inputs_of(joint.module.graph)}
    tangents = _tangents(joint.module)
    for node in inputs_of(forward.graph):
        node.meta[SOURCE] = Source("tensor", described[node.name].index)
    returned = returned_by(forward.graph)
    saved = returned[results:]
    kept = [node for node in saved if node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)]
    for node in inputs_of(backward.graph):
        name = _name_in_forward(node)
        description = described.get(name)
        if description is not None and description.kind == "input":
            node.meta[SOURCE] = Source("tensor", description.index)
        elif node.name in tangents:
            node.meta[SOURCE] = Source("tangent", joint.tangents[tangents.index(node.name)])
        elif isinstance(node.meta.get("val"), torch.Tensor):
            node.meta[SOURCE] = Source("saved", next(k for k, value in enumerate(kept) if value.name == name))
    output_of(forward.graph).args = ((*returned[:results], *kept),)
    return PhaseGraph(forward, results), PhaseGraph(backward, 0)


def _save_bases(forward: fx.Graph, backward: fx.Graph, results: int) -> None:
    """Saves what views are of, which the backward views again: a view of an input or result would be a copy."""
    returned = returned_by(forward)
    saved: dict[fx.Node, None] = {}
    for node in returned[results:]:
        base, views = _base_of(node)
        place = _saved_place(backward, base) if views else None
        if place is None:
            saved[node] = None
            continue
        saved[base] = None
        own = next(other for other in inputs_of(backward) if _name_in_forward(other) == node.name)
        with backward.inserting_before(_first_after_inputs(backward)):
            value = place
            for view in views:
                assert isinstance(view.target, OpOverload)
                value = backward.call_function(view.target, (value, *view.args[1:]), view.kwargs)
                value.meta = dict(view.meta)
        own.replace_all_uses_with(value)
        backward.erase_node(own)
    output_of(forward).args = ((*returned[:results], *saved),)


def _base_of(value: Any) -> tuple[Any, list[fx.Node]]:
    """What a saved value is a view of, and the views in between, first to last; of as many elements or fewer."""
    views: list[fx.Node] = []
    while isinstance(value, fx.Node) and value.target in _WHOLE_VIEWS:
        base = first_argument(value)
        if len(value.all_input_nodes) > 1 or base.op == "get_attr":
            break
        views.insert(0, value)
        value = base
    return value, views


def _saved_place(backward: fx.Graph, base: fx.Node) -> fx.Node | None:
    """The input of a backward for a value of the forward; None where the backward computes that value again."""
    found = next((node for node in backward.nodes if _name_in_forward(node) == base.name), None)
    if found is not None:
        return found if found.op == "placeholder" else None
    with backward.inserting_before(_first_after_inputs(backward)):
        place = backward.placeholder(base.name)
    place.meta = {"val": base.meta["val"], _SAVED: base.name}
    return place


def _name_in_forward(node: fx.Node) -> str:
    """The name in the forward of what a backward's input is, which the backward's own name may only resemble."""
    return node.meta.get(_SAVED, node.name)


def _first_after_inputs(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _tangents(module: fx.GraphModule) -> list[str]:
    return [node.name for node in inputs_of(module.graph) if node.meta["described"].kind == "tangent"]


def _stitched(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> fx.GraphModule:
    """Forward and backward one after the other in one graph, with what the backward computes again."""
    graph = fx.Graph()
    copies: dict[str, fx.Node] = {}
    returned: list[fx.Node] = []
    for module in (forward, backward):
        local: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes if module is forward else _by_need(module.graph):
            if node.op == "placeholder" and node.name in copies:
                local[node] = copies[node.name]
            elif node.op != "output":
                local[node] = graph.node_copy(node, local.__getitem__)
                if module is forward:
                    copies[node.name] = local[node]
                elif node.name in copies and not is_marked(node):
                    # What a budget has chosen; equal nodes are not to become one again.
                    mark_recomputed(local[node], 0)
        wanted = returned_by(module.graph)
        returned += [local[node] for node in (wanted[:results] if module is forward else wanted)]
    graph.output(tuple(returned))
    return fx.GraphModule(forward, graph)


def _by_need(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a backward in an order where what is computed again comes right before it is read."""
    inputs = inputs_of(graph)
    gradients = {node for node in inputs if "described" in node.meta and node.meta["described"].kind == "tangent"}
    done = dict.fromkeys(inputs)
    for node in graph.nodes:
        if any(argument in gradients for argument in node.all_input_nodes):
            gradients.add(node)
        if node in gradients or node.op == "output":
            waiting = [node]
            while waiting:
                last = waiting[-1]
                missing = [argument for argument in last.all_input_nodes if argument not in done]
                waiting.extend(missing)
                if not missing:
                    done[waiting.pop()] = None
    return list(done)


def saved_inputs(backward: PhaseGraph) -> tuple[int, ...]:
    """Positions of the tensor inputs that a backward reads."""
    sources: Sequence[Source] = [node.meta[SOURCE] for node in inputs_of(backward.module.graph)]
    return tuple(sorted({source.index for source in sources if source.kind == "tensor"}))
