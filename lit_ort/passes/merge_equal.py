"""Merges nodes that compute the same value (common subexpression elimination).

In:  calls of one operator with the same arguments, such as two casts of one weight, or a mask that every layer creates
Out: one of these nodes
Saves the time and memory of the others. Operators that draw random numbers and nodes that are marked for recomputation
are not merged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import is_marked
from lit_ort._compat.torch_fx import tree_flatten
from lit_ort._compat.torch_ops import OpOverload, draws, is_mutable
from lit_ort.ops.writes import IN_PLACE
from lit_ort.runtime.argument_codec import exact

aten = torch.ops.aten


def merge_equal(module: fx.GraphModule) -> int:
    """Merges equal nodes of a graph in place. Returns the number of nodes that were removed."""
    graph, fired = module.graph, 0
    first_nodes: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _can_merge(node):
            continue
        key = _key(node)
        first = first_nodes.get(key)
        if first is None:
            first_nodes[key] = node
        else:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            fired += 1
    return fired


def _can_merge(node: fx.Node) -> bool:
    if node.op != "call_function" or is_marked(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    target = node.target
    if not isinstance(target, OpOverload) or is_mutable(target) or draws(node):
        return False
    # Each value that is written into needs memory of its own.
    is_written = not node.all_input_nodes and any(user.target in IN_PLACE for user in node.users)
    return target.namespace in ("aten", "prims") and not is_written


def _key(node: fx.Node) -> Any:
    leaves, spec = tree_flatten((node.args, node.kwargs))
    parts = tuple(exact(str(leaf) if isinstance(leaf, torch.SymInt) else leaf) for leaf in leaves)
    return node.target, parts, str(spec)
