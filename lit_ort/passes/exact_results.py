"""Results of float32 kernels in the place of bfloat16 values: what reads them in float32 reads them unrounded."""

from __future__ import annotations

import torch
from torch import fx

from lit_ort._compat.torch_fx import is_view
from lit_ort.passes.node_builder import NodeBuilder

_CAST = torch.ops.aten._to_copy.default


def cast(builder: NodeBuilder, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A value in a dtype; the value itself if it has this dtype."""
    return node if node.meta["val"].dtype == dtype else builder(_CAST, node, dtype=dtype)


def rounded(builder: NodeBuilder, node: fx.Node, exact: fx.Node) -> fx.Node:
    """What replaces a node: a value in the node's dtype.

    Args:
        builder: adds nodes before the node.
        node: the node. Its casts to the dtype of `exact`, also of its views, are replaced.
        exact: the value in the same or another dtype.
    """
    if exact.meta["val"].dtype == node.meta["val"].dtype:
        return exact
    _read_exactly(node, exact)
    return cast(builder, exact, node.meta["val"].dtype)


def _read_exactly(node: fx.Node, exact: fx.Node) -> None:
    dtype = exact.meta["val"].dtype
    for user in list(node.users):
        if _is_cast(user, dtype):
            user.replace_all_uses_with(exact)
            node.graph.erase_node(user)
        elif _has_casts(user, dtype):
            with node.graph.inserting_before(user):
                _, *rest = user.args
                view = NodeBuilder(node.graph, user.meta)(user.target, exact, *rest, **user.kwargs)
            _read_exactly(user, view)
            if not user.users:
                node.graph.erase_node(user)


def _has_casts(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a node is a view of which a cast, or a view with casts, reads the elements."""
    return is_view(node) and any(_is_cast(user, dtype) or _has_casts(user, dtype) for user in node.users)


def _is_cast(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a node casts to a dtype and does nothing else."""
    return node.target is _CAST and node.kwargs == {"dtype": dtype}
