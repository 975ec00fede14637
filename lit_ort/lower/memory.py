"""The memory of a phase, computed from its graph: the most that its values hold at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, first_argument, is_element, is_view
from lit_ort._compat.torch_sizes import hint_of
from lit_ort.ops import operator_of
from lit_ort.ops.hand_over import hand_over


def peak_bytes(graph: fx.Graph) -> int:
    """The most bytes that values of one run hold at a time beside its inputs, outputs and workspaces included."""
    nodes = list(graph.nodes)
    last = _last_uses(nodes)
    held = peak = 0
    sizes: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        if node.op == "call_function" and not is_view(node):
            sizes[node] = 0 if _is_written_over(node) else _bytes(node)
            held += sizes[node]
            peak = max(peak, held + _workspace(node))
        for dead in last.get(position, ()):
            held -= sizes.get(dead, 0)
    return peak


def home(node: fx.Node) -> fx.Node:
    """The node whose memory a value lies in."""
    while is_view(node) or (is_element(node) and isinstance(node.args[0], fx.Node)):
        node = first_argument(node)
    return home(_written(node)) if _is_written_over(node) else node


def _last_uses(nodes: list[fx.Node]) -> dict[int, list[fx.Node]]:
    """For each position, the values whose memory nothing reads after it; what is returned stays."""
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        if node.op == "call_function" and not is_view(node):
            last.setdefault(home(node), position)
        for argument in node.all_input_nodes:
            last[home(argument)] = position
    uses: dict[int, list[fx.Node]] = {}
    for node, position in last.items():
        if nodes[position].op != "output":
            uses.setdefault(position, []).append(node)
    return uses


def _is_written_over(node: fx.Node) -> bool:
    own = operator_of(node.target)
    return own is not None and own.writes_into is not None


def _written(node: fx.Node) -> fx.Node:
    own = operator_of(node.target)
    assert own is not None
    assert own.writes_into is not None
    return arguments_of(node)[own.writes_into]


def _bytes(node: fx.Node) -> int:
    if node.target is hand_over:
        # The optimizer takes the gradient, and nothing is left.
        return 0
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return 0 if is_element(node) else sum(_tensor_bytes(one) for one in values)


def _tensor_bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = map(hint_of, value.shape)
    return math.prod(sizes) * value.dtype.itemsize


def _workspace(node: fx.Node) -> int:
    own = operator_of(node.target)
    if own is None or own.workspace_bytes is None:
        return 0
    args = fx.map_arg(node.args, lambda argument: argument.meta["val"])
    kwargs = fx.map_arg(node.kwargs, lambda argument: argument.meta["val"])
    return int(own.workspace_bytes(*args, **kwargs))
