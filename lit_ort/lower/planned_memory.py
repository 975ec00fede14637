"""Plans the memory of a phase from its graph: the largest number of bytes in use at the same time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import is_element, is_view
from lit_ort._compat.torch_sizes import hint_of
from lit_ort.lower.native_operators import native_lowering_of
from lit_ort.ops import operator_of
from lit_ort.ops.hand_over import hand_over
from lit_ort.ops.region_operator import REGION
from lit_ort.passes.owners import is_region_output, memory_owner, overwritten


def peak_bytes(graph: fx.Graph, is_native: bool = False) -> int:
    """The peak number of bytes of the values of one run, including outputs and workspaces, without inputs.

    Args:
        graph: a phase.
        is_native: whether it is a native session, whose matmuls are not this project's operators.
    """
    nodes = list(graph.nodes)
    last_uses = _last_uses(nodes)
    live = peak = 0
    sizes: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        if node.op == "call_function" and not is_view(node):
            sizes[node] = 0 if overwritten(node) is not None else _bytes(node)
            live += sizes[node]
            peak = max(peak, live + (0 if is_native and native_lowering_of(node) is not None else _workspace(node)))
        for value in last_uses.get(position, ()):
            live -= sizes.get(value, 0)
    return peak


def _last_uses(nodes: list[fx.Node]) -> dict[int, list[fx.Node]]:
    """For each position, the values whose memory is not read after it. The memory of outputs is never freed."""
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        if node.op == "call_function" and not is_view(node):
            last.setdefault(memory_owner(node), position)
        for argument in node.all_input_nodes:
            last[memory_owner(argument)] = position
    uses: dict[int, list[fx.Node]] = {}
    for node, position in last.items():
        if nodes[position].op != "output":
            uses.setdefault(position, []).append(node)
    return uses


def _bytes(node: fx.Node) -> int:
    if node.target is hand_over:
        # The optimizer consumes the gradient.
        return 0
    if node.target is REGION or (is_element(node) and not is_region_output(node)):
        return 0
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return sum(_tensor_bytes(value) for value in values)


def _tensor_bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = map(hint_of, value.shape)
    return math.prod(sizes) * value.dtype.itemsize


def _workspace(node: fx.Node) -> int:
    operator = operator_of(node.target)
    if operator is None or operator.workspace_bytes is None:
        return 0
    args = fx.map_arg(node.args, lambda argument: argument.meta["val"])
    kwargs = fx.map_arg(node.kwargs, lambda argument: argument.meta["val"])
    return int(operator.workspace_bytes(*args, **kwargs))
