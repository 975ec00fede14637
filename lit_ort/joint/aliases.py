"""Aliases among results that AOTAutograd does not report.

AOTAutograd reports outputs that are views of inputs, and most views of values that require grad. For other values, and
for the parts of a split value, the traced graph simply returns views, and its results have to share memory as in eager.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import OF_BACKWARD, Description
from lit_ort._compat.torch_fx import first_argument, inputs_of, is_alias, is_element, output_of, returned_by
from lit_ort.joint.trace import JointGraph, tangents_of

aten = torch.ops.aten


def share_memory(joint: JointGraph) -> JointGraph:
    """Turns results that are views of one value into aliases of it. The value becomes a result if it is not one.

    The gradients of parts of one split value arrive as the gradient of the value.
    """
    graph = joint.module.graph
    returned = returned_by(graph)
    count = len(joint.results)
    groups: dict[fx.Node, list[int]] = {}
    for position, result in enumerate(joint.results):
        node = returned[position]
        if result.kind == "output" and result.index not in joint.aliases and isinstance(node, fx.Node):
            groups.setdefault(_base_of(node), []).append(position)
    tangents = dict(zip(joint.tangents, tangents_of(joint.module), strict=True))
    results, bases, aliases = list(joint.results), list[Any](), dict(joint.aliases)
    for base, members in groups.items():
        position = next((k for k in members if returned[k] is base), None)
        views = [k for k in members if k != position]
        parts = {k: returned[k] for k in views if k in tangents}
        if len(members) < 2 or base.op != "call_function":
            continue
        if position not in tangents and not _are_parts_of_one_split(list(parts.values())):
            continue
        if position is None:
            position = len(results)
            bases.append(base)
            results.append(Description("base", joint.results[members[0]].index))
        if position in tangents:
            _drop(graph, [tangents.pop(k) for k in parts])
        elif parts:
            tangents[position] = _tangent_of(base, graph)
            _divide(tangents[position], base, {tangents.pop(k): part for k, part in parts.items()})
        aliases |= {joint.results[k].index: ("result", position) for k in views}
    output_of(graph).args = ((*returned[:count], *bases, *returned[count:]),)
    ordered = {node: position for position, node in tangents.items()}
    positions = tuple(ordered[node] for node in inputs_of(graph) if node in ordered)
    return dataclasses.replace(joint, results=tuple(results), aliases=aliases, tangents=positions)


def _are_parts_of_one_split(nodes: Sequence[fx.Node]) -> bool:
    """Whether values are different parts of one value, as `chunk`, `split` and `unbind` return them."""
    splits = {first_argument(node) if is_element(node) else node for node in nodes}
    return not nodes or (len(splits) == 1 and all(map(is_element, nodes)) and len(set(nodes)) == len(nodes))


def _tangent_of(base: fx.Node, graph: fx.Graph) -> fx.Node:
    """A new input for the gradient of a value."""
    with graph.inserting_after(inputs_of(graph)[-1]):
        # torch's partitioner knows gradients by this name.
        tangent = graph.placeholder(f"tangents_of_{base.name}")
    tangent.meta = {"val": base.meta["val"], "description": Description("tangent", 0, of_base=True)}
    return tangent


def _drop(graph: fx.Graph, tangents: Sequence[fx.Node]) -> None:
    """Replaces the gradients of views, which arrive as part of the gradient of their base, by zeros."""
    for tangent in tangents:
        value = tangent.meta["val"]
        with graph.inserting_before(_start_of_backward(graph, [tangent])):
            zeros = graph.call_function(
                aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": value.device}
            )
        zeros.meta = {**OF_BACKWARD, "val": value}
        tangent.replace_all_uses_with(zeros)
        graph.erase_node(tangent)


def _divide(tangent: fx.Node, base: fx.Node, parts: dict[fx.Node, fx.Node]) -> None:
    """Replaces the gradients of parts by the same parts of the gradient of their base, and removes these inputs."""
    graph = tangent.graph
    copies = {base: tangent}
    start = _start_of_backward(graph, list(parts))
    for part_tangent, part in parts.items():
        chain = [part]
        while chain[-1] not in copies:
            chain.append(first_argument(chain[-1]))
        with graph.inserting_before(start):
            for node in reversed(chain[:-1]):
                copies[node] = graph.node_copy(node, lambda argument: copies.get(argument, argument))
                copies[node].meta = {**node.meta, **OF_BACKWARD}
        part_tangent.replace_all_uses_with(copies[part])
        graph.erase_node(part_tangent)


def _start_of_backward(graph: fx.Graph, tangents: Sequence[fx.Node]) -> fx.Node:
    """The first node that reads some gradients. torch's partitioner assigns nodes before it to the forward."""
    users = {user for tangent in tangents for user in tangent.users}
    return next(node for node in graph.nodes if node in users or node.op == "output")


def _base_of(node: fx.Node) -> fx.Node:
    """The node that a value is a view of, through all views in between."""
    while is_alias(node):
        node = first_argument(node)
    return node
