"""Results that share memory with each other, or whose elements have gaps or overlap, as views of a returned base.

Of the outputs that require grad, AOTAutograd reports views of inputs if they are not all results of operators such as
`chunk`, and views of a computed value if they are also not alone; `name_bases` makes it report the others too. For
other values, the traced graph simply returns views, and its results have to share memory as in eager.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch import memory_of
from lit_ort._compat.torch_aot import Description
from lit_ort._compat.torch_fx import (
    copy_nodes,
    example_of,
    graph_module_of,
    inputs_of,
    output_of,
    returned_by,
    viewed_base,
)
from lit_ort._compat.torch_sizes import hint_of, may_overlap, memory_order
from lit_ort.errors import CaptureError
from lit_ort.joint.trace import JointGraph


def name_bases(module: fx.GraphModule, differentiable: Sequence[int]) -> fx.GraphModule:
    """Return a copy of a captured graph that also returns views of each base whose views have to be reported: one of an
    input, two of a computed value.

    Args:
        module: the captured graph.
        differentiable: the positions of the outputs that can receive a gradient.
    """
    graph = fx.Graph()
    outputs = copy_nodes(module.graph, graph, {})
    bases: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if isinstance(example_of(node), torch.Tensor):
            bases.setdefault(memory_of(example_of(node)), node)
    members: dict[fx.Node, list[int]] = {}
    for position, node in enumerate(outputs):
        if isinstance(example_of(node), torch.Tensor):
            members.setdefault(bases[memory_of(example_of(node))], []).append(position)
    for base, positions in members.items():
        is_input = base.op == "placeholder"
        is_shared = is_input or len(positions) > 1 or memory_order(example_of(outputs[positions[0]])) is None
        if base.op != "get_attr" and is_shared and not set(differentiable).isdisjoint(positions):
            views = [graph.call_function(torch.ops.aten.alias.default, (base,)) for _ in range(1 if is_input else 2)]
            outputs += [_with_meta(view, base) for view in views]
    graph.output(tuple(outputs))
    return graph_module_of(module, graph)


def require_distinct_elements(module: fx.GraphModule, differentiable: Sequence[int]) -> None:
    """Refuses views with a gradient of an input whose elements share memory.

    A view of an input is made by its place in memory, and its gradient would be that of the memory, not of an element.

    Args:
        module: the captured graph.
        differentiable: the positions of the outputs that can receive a gradient.

    Raises:
        CaptureError: an output is such a view.
    """
    inputs = (example_of(node) for node in inputs_of(module.graph))
    overlapping = {
        memory_of(value): value for value in inputs if isinstance(value, torch.Tensor) and may_overlap(value)
    }
    returned = returned_by(module.graph)
    for value in (overlapping.get(memory_of(example_of(returned[position]))) for position in differentiable):
        if value is not None:
            raise CaptureError(
                f"it returns a view of an input whose elements share memory (strides {tuple(value.stride())} for the "
                f"shape {tuple(map(hint_of, value.shape))}), and each element has a gradient of its own",
                remedy="Pass a copy of the input, with contiguous() or clone().",
            )


def _with_meta(node: fx.Node, other: fx.Node) -> fx.Node:
    node.meta = dict(other.meta)
    return node


def share_memory(joint: JointGraph, differentiable: Sequence[int]) -> JointGraph:
    """Turns results without gradients that are views of one value into aliases of it. The value becomes a result if it
    is not one.

    Args:
        joint: the joint graph.
        differentiable: the positions of the outputs that can receive a gradient in another form of the graph.

    Raises:
        CaptureError: a result with a gradient of its own shares its memory with another result.
    """
    graph = joint.module.graph
    returned = returned_by(graph)
    count = len(joint.results)
    groups: dict[fx.Node, list[int]] = {}
    for position, result in enumerate(joint.results):
        node = returned[position]
        if result.kind == "output" and result.index not in joint.aliases and isinstance(node, fx.Node):
            groups.setdefault(viewed_base(node), []).append(position)
    results, bases, aliases = list(joint.results), list[Any](), dict(joint.aliases)
    for base, members in groups.items():
        position = _position_of(base, returned, joint)
        others = [k for k in members if k != position]
        is_alone = position is None and len(others) == 1
        has_gaps = bool(others) and memory_order(example_of(returned[others[0]])) is None
        if base.op != "call_function" or not others or (is_alone and not has_gaps):
            continue
        if not set(others).isdisjoint(joint.tangents):
            raise CaptureError(
                f"the graph returns {base.name} or views of it in a way that AOTAutograd doesn't report",
                remedy="Return copies of the views, with clone().",
            )
        if position is None:
            position = len(results)
            bases.append(base)
            indices = [joint.results[k].index for k in others]
            results.append(Description("base", next((k for k in indices if k in differentiable), indices[0])))
        aliases |= {joint.results[k].index: ("result", position) for k in others}
    output_of(graph).args = ((*returned[:count], *bases, *returned[count:]),)
    return dataclasses.replace(joint, results=tuple(results), aliases=aliases)


def _position_of(base: fx.Node, returned: Sequence[Any], joint: JointGraph) -> int | None:
    """The position of the result that is a base itself, or None."""
    pairs = zip(returned, joint.results, strict=False)
    return next((k for k, (node, r) in enumerate(pairs) if node is base and not _is_alias(r, joint)), None)


def _is_alias(result: Description, joint: JointGraph) -> bool:
    return result.kind == "mutation" or (result.kind == "output" and result.index in joint.aliases)
