"""The node that allocated the memory of a value, through views and in-place operators."""

from __future__ import annotations

from torch import fx

from lit_ort._compat.torch_fx import arguments_of, first_argument, is_alias, is_element, is_view
from lit_ort.ops import operator_of
from lit_ort.ops.region_operator import REGION


def memory_owner(node: fx.Node) -> fx.Node:
    """The node that allocated the memory of a value."""
    while (base := shared_with(node)) is not None:
        node = base
    return node


def shared_with(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the result of a node shares; None if it has its own."""
    if is_region_output(node):
        return None
    if is_element(node) or is_view(node) or is_alias(node):
        return first_argument(node)
    return overwritten(node)


def is_region_output(node: fx.Node) -> bool:
    """Whether a node is an output of a region; each has memory of its own."""
    return is_element(node) and first_argument(node).target is REGION


def overwritten(node: fx.Node) -> fx.Node | None:
    """The argument that a node writes into, or None."""
    operator = operator_of(node.target)
    if operator is None or operator.writes_into is None:
        return None
    return arguments_of(node)[operator.writes_into]
