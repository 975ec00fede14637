"""Aliases among results without gradients, which AOTAutograd does not report.

AOTAutograd reports outputs that are views of inputs, and views of values that require grad. For other values, the
traced graph simply returns views, and its results have to share memory as in eager.
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
    """Turns results that are views of one value into aliases of it. The value becomes a result if it is not one."""
    graph = joint.module.graph
    returned = returned_by(graph)
    count = len(joint.results)
    groups: dict[fx.Node, list[int]] = {}
    for position, result in enumerate(joint.results):
        node = returned[position]
        if result.kind == "output" and result.index not in joint.aliases and isinstance(node, fx.Node):
            groups.setdefault(_base_of(node), []).append(position)
    results, bases, aliases = list(joint.results), list[Any](), dict(joint.aliases)
    for base, members in groups.items():
        if len(members) < 2 or base.op != "call_function":
            continue
        position = _position_of(base, returned, members)
        if position is None:
            position = len(results)
            bases.append(base)
            results.append(Description("base", joint.results[members[0]].index))
        aliases |= {joint.results[k].index: ("result", position) for k in members if k != position}
    output_of(graph).args = ((*returned[:count], *bases, *returned[count:]),)
    return dataclasses.replace(joint, results=tuple(results), aliases=aliases)


def _position_of(base: fx.Node, returned: Sequence[Any], members: Sequence[int]) -> int | None:
    return next((k for k in members if returned[k] is base), None)


def _base_of(node: fx.Node) -> fx.Node:
    """The node that a value is a view of, through all views in between."""
    while is_alias(node):
        node = first_argument(node)
    return node
