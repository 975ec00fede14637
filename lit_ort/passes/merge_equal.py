"""Computes once what several nodes compute alike.

In:  operators of one kind on the same arguments, such as a weight rounded twice, a mask made in every layer
Out: one of them, read by all
Saves their time and memory. Operators that draw random numbers, and what is to be computed again, stay apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import is_marked
from lit_ort._compat.torch_fx import tree_flatten
from lit_ort._compat.torch_ops import OpOverload, draws, is_mutable

aten = torch.ops.aten


def merge_equal(module: fx.GraphModule) -> int:
    """Rewrites a graph in place; returns how many nodes went."""
    graph, fired = module.graph, 0
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _may_merge(node):
            continue
        key = _key(node)
        first = known.get(key)
        if first is None:
            known[key] = node
        else:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            fired += 1
    return fired


def _may_merge(node: fx.Node) -> bool:
    if node.op != "call_function" or is_marked(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    target = node.target
    if not isinstance(target, OpOverload) or is_mutable(target) or draws(node):
        return False
    return target.namespace in ("aten", "prims")


def _key(node: fx.Node) -> Any:
    leaves, spec = tree_flatten((node.args, node.kwargs))
    parts = tuple((type(leaf), str(leaf) if isinstance(leaf, torch.SymInt) else leaf) for leaf in leaves)
    return node.target, parts, str(spec)
