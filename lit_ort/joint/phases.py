"""Divides the joint graph into phases: one for a fused or forward step, two for a split step.

Torch's partitioners (torch._functorch.partitioners) select the saved tensors.

Source: Chen et al. 2016 for recomputed activations; torch's min-cut partitioner, which solves a knapsack problem, for
the activation memory budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import OF_BACKWARD, is_marked, mark_recomputed, partition
from lit_ort._compat.torch_fx import first_argument, graph_module_of, inputs_of, output_of, returned_by, viewed_base
from lit_ort._compat.torch_ops import OpOverload
from lit_ort.capture.input_sources import SOURCE
from lit_ort.joint.trace import JointGraph, tangents_of
from lit_ort.runtime.program import Source

aten = torch.ops.aten
# Views that contain all elements of a value.
_WHOLE_VIEWS = frozenset(
    {aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default}
    | {aten.unsqueeze.default, aten.expand.default, aten.squeeze.dim, aten.squeeze.dims, aten.detach.default}
)
_SAVED = "lit_ort_saved"


@dataclasses.dataclass(frozen=True)
class PhaseGraph:
    """A graph that becomes one session.

    Args:
        module: the graph; each input has its `Source` in `meta[SOURCE]`, and the outputs are those of the session.
        results: the number of results, which are the first outputs; saved tensors or gradients follow.
    """

    module: fx.GraphModule
    results: int


def one_phase(joint: JointGraph, loss: int | None, budget: float | None, recomputes: bool) -> PhaseGraph:
    """Return a graph that computes results and gradients in one run, for a loss gradient of one and no other gradients.

    Args:
        joint: the joint graph.
        loss: the position of the loss among the results; None without gradients.
        budget: the fraction of activation memory that may be saved, between 0 and 1, or None.
        recomputes: whether nodes are marked for recomputation in the backward.
    """
    module = joint.module
    if loss is not None and (recomputes or budget is not None):
        forward, backward = partition(module, len(joint.results), budget)
        module = _concatenated(forward, backward, len(joint.results))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    tangents = dict(zip(_tangents(joint.module), joint.tangents, strict=True))
    for node in module.graph.nodes:
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
    return PhaseGraph(graph_module_of(module, graph), len(joint.results))


def two_phases(joint: JointGraph, budget: float | None) -> tuple[PhaseGraph, PhaseGraph]:
    """Return the forward, which also returns the saved tensors, and the backward."""
    results = len(joint.results)
    forward, backward = partition(joint.module, results, budget)
    _save_bases(forward.graph, backward.graph, results)
    tangents = _tangents(joint.module)
    sources = {node.name: node.meta[SOURCE] for node in inputs_of(joint.module.graph) if node.name not in tangents}
    sources |= {name: Source("tangent", result) for name, result in zip(tangents, joint.tangents, strict=True)}
    returned = returned_by(forward.graph)
    values = returned[results:]
    saved = [node for node in values if node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)]
    for node in inputs_of(backward.graph):
        name = _name_in_forward(node)
        if name in sources:
            node.meta[SOURCE] = sources[name]
        elif isinstance(node.meta.get("val"), torch.Tensor):
            node.meta[SOURCE] = Source("saved", next(k for k, value in enumerate(saved) if value.name == name))
    output_of(forward.graph).args = ((*returned[:results], *saved),)
    return PhaseGraph(forward, results), PhaseGraph(backward, 0)


def _save_bases(forward: fx.Graph, backward: fx.Graph, results: int) -> None:
    """Saves the bases of views instead of the views, which the backward recreates.

    A saved view would be a copy if its base is an input, a result or also saved.
    """
    returned = returned_by(forward)
    saved: dict[fx.Node, None] = {}
    for node in returned[results:]:
        base, views = _base_of(node)
        base_input = _saved_input(backward, base) if views else None
        if base_input is None:
            saved[node] = None
            continue
        saved[base] = None
        view_input = next(other for other in inputs_of(backward) if _name_in_forward(other) == node.name)
        with backward.inserting_before(_first_after_inputs(backward)):
            value = base_input
            for view in views:
                assert isinstance(view.target, OpOverload)
                value = backward.call_function(view.target, (value, *view.args[1:]), view.kwargs)
                value.meta = dict(view.meta)
        view_input.replace_all_uses_with(value)
        backward.erase_node(view_input)
    output_of(forward).args = ((*returned[:results], *saved),)


def _base_of(value: Any) -> tuple[Any, list[fx.Node]]:
    """The base of a saved value, which has as many elements or fewer, and the views in between, first to last."""
    views: list[fx.Node] = []
    while isinstance(value, fx.Node) and value.target in _WHOLE_VIEWS:
        base = first_argument(value)
        if len(value.all_input_nodes) > 1 or base.op == "get_attr":
            break
        views.insert(0, value)
        value = base
    return value, views


def _saved_input(backward: fx.Graph, base: fx.Node) -> fx.Node | None:
    """The input of the backward for a value of the forward; None if the backward computes the value again."""
    existing = next((node for node in backward.nodes if _name_in_forward(node) == base.name), None)
    if existing is not None:
        return existing if existing.op == "placeholder" else None
    with backward.inserting_before(_first_after_inputs(backward)):
        saved_input = backward.placeholder(base.name)
    saved_input.meta = {"val": base.meta["val"], _SAVED: base.name}
    return saved_input


def _name_in_forward(node: fx.Node) -> str:
    """The name of the forward's node for an input of the backward. FX can add a suffix to the name of the input."""
    return node.meta.get(_SAVED, node.name)


def _first_after_inputs(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _tangents(module: fx.GraphModule) -> list[str]:
    return [node.name for node in tangents_of(module)]


def _concatenated(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> fx.GraphModule:
    """Forward and backward, including its recomputed nodes, in one graph."""
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
                    # Recomputed because of the budget; the mark keeps merge_equal from merging it with the forward.
                    mark_recomputed(local[node], 0)
        outputs = returned_by(module.graph)
        returned += [local[node] for node in (outputs[:results] if module is forward else outputs)]
    graph.output(tuple(returned))
    return graph_module_of(forward, graph)


def _by_need(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a backward, ordered so that recomputed nodes come immediately before their first use."""
    inputs = inputs_of(graph)
    gradients = {node for node in inputs if "description" in node.meta and node.meta["description"].kind == "tangent"}
    ordered = dict.fromkeys(inputs)
    for node in graph.nodes:
        if any(argument in gradients for argument in node.all_input_nodes):
            gradients.add(node)
        if node in gradients or node.op == "output":
            stack = [node]
            while stack:
                arguments = [argument for argument in stack[-1].all_input_nodes if argument not in ordered]
                stack.extend(arguments)
                if not arguments:
                    ordered[stack.pop()] = None
    return list(ordered)


def saved_inputs(backward: PhaseGraph) -> set[int]:
    """The positions of the tensor inputs that the backward reads. Saved sizes have no source: shapes determine them."""
    inputs = [node for node in inputs_of(backward.module.graph) if isinstance(node.meta["val"], torch.Tensor)]
    sources: Sequence[Source] = [node.meta[SOURCE] for node in inputs]
    return {source.index for source in sources if source.kind == "tensor"}


def inputs_of_backward(joint: JointGraph) -> set[int]:
    """The positions of the tensor inputs that the backward of a joint graph reads, as they are or through views."""
    tangents = set(_tangents(joint.module))
    backward: set[fx.Node] = set()
    read: set[int] = set()
    for node in joint.module.graph.nodes:
        if node.name in tangents or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
            bases = () if node.op == "output" else map(viewed_base, node.all_input_nodes)
            inputs = [base for base in bases if base.op == "placeholder" and base.name not in tangents]
            sources: Sequence[Source] = [node.meta[SOURCE] for node in inputs]
            read |= {source.index for source in sources if source.kind == "tensor"}
    return read


def results_of_gradients(joint: JointGraph) -> tuple[tuple[int, ...], ...]:
    """For each gradient, the positions of the results through which it arrives."""
    names = _tangents(joint.module)
    reached: dict[fx.Node, frozenset[int]] = {}
    for node in joint.module.graph.nodes:
        own = [joint.tangents[names.index(node.name)]] if node.name in names else []
        reached[node] = frozenset(own).union(*(reached[argument] for argument in node.all_input_nodes))
    gradients = returned_by(joint.module.graph)[len(joint.results) :]
    return tuple(tuple(sorted(reached[gradient])) for gradient in gradients)
