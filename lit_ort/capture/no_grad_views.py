"""Views that a graph creates under `no_grad` of values that require grad: no gradient passes through them."""

from __future__ import annotations

import torch
from torch import fx

from lit_ort._compat.torch import set_grad_enabled
from lit_ort._compat.torch_fx import first_argument, is_alias, returned_by
from lit_ort._compat.torch_ops import is_mutable


def untracked_views(graph: fx.Graph) -> frozenset[int]:
    """The positions of the outputs of a captured graph that are such views.

    AOTAutograd recreates them from their base outside of the `no_grad` region, where they would require grad.
    """
    untracked, outputs = untracked_nodes(graph), returned_by(graph)
    return frozenset(
        k for k, value in enumerate(outputs) if isinstance(value, fx.Node) and _has_untracked_view(value, untracked)
    )


def untracked_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes inside of `no_grad`."""
    enabled, untracked = torch.is_grad_enabled(), set[fx.Node]()
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif not enabled:
            untracked.add(node)
    return untracked


def _has_untracked_view(node: fx.Node, untracked: set[fx.Node]) -> bool:
    """Whether a value, or a view between it and its base, is an untracked view."""
    while is_alias(node):
        if node in untracked and not is_mutable(node.target):
            return True
        node = first_argument(node)
    return False
