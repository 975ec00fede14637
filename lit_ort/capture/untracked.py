"""Views made where gradients are off, of values that need one: no gradient goes through them."""

from __future__ import annotations

import torch
from torch import fx

from lit_ort._compat.torch import set_grad_enabled
from lit_ort._compat.torch_fx import first_argument, is_alias, returned_by
from lit_ort._compat.torch_ops import is_mutable


def untracked_views(graph: fx.Graph) -> frozenset[int]:
    """The positions of a captured graph's outputs that are such views.

    AOTAutograd makes them anew from what they are of, outside of the region where they were made.
    """
    enabled, made_untracked = torch.is_grad_enabled(), set[fx.Node]()
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif not enabled and not is_mutable(node.target):
            made_untracked.add(node)
    returned = returned_by(graph)
    return frozenset(
        k for k, value in enumerate(returned) if isinstance(value, fx.Node) and _passes(value, made_untracked)
    )


def _passes(node: fx.Node, untracked: set[fx.Node]) -> bool:
    """Whether one of the views between a value and the memory that it lies in is untracked."""
    while is_alias(node):
        if node in untracked:
            return True
        node = first_argument(node)
    return False
