"""Results that share memory with each other where AOTAutograd leaves it to the graph: those without gradients.

AOTAutograd says which outputs are views of inputs, and of what a gradient flows through. Of other values the traced
graph returns views, and what runs it has to give values that share memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from lit_ort._compat.torch_aot import Description
from lit_ort._compat.torch_fx import first_argument, is_alias, output_of, returned_by
from lit_ort.joint.trace import JointGraph


def share_memory(joint: JointGraph) -> JointGraph:
    """Makes aliases of results that are views of one value, which becomes a result of its own where it is none."""
    graph = joint.module.graph
    returned = returned_by(graph)
    count = len(joint.results)
    groups: dict[fx.Node, list[int]] = {}
    for position, result in enumerate(joint.results):
        node = returned[position]
        if result.kind == "output" and result.index not in joint.aliases and isinstance(node, fx.Node):
            groups.setdefault(_owner(node), []).append(position)
    results, bases, aliases = list(joint.results), list[Any](), dict(joint.aliases)
    for owner, members in groups.items():
        if len(members) < 2 or owner.op != "call_function":
            continue
        base = _position_of(owner, returned, members)
        if base is None:
            base = len(results)
            bases.append(owner)
            results.append(Description("base", joint.results[members[0]].index))
        aliases |= {joint.results[k].index: ("result", base) for k in members if k != base}
    output_of(graph).args = ((*returned[:count], *bases, *returned[count:]),)
    return dataclasses.replace(joint, results=tuple(results), aliases=aliases)


def _position_of(owner: fx.Node, returned: Sequence[Any], members: Sequence[int]) -> int | None:
    return next((k for k in members if returned[k] is owner), None)


def _owner(node: fx.Node) -> fx.Node:
    """The node that computed the memory that a value lies in."""
    while is_alias(node):
        node = first_argument(node)
    return node
