"""Adds nodes to a graph, with their examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import recomputed_example, size_node

aten = torch.ops.aten


class NodeBuilder:
    """Adds nodes to a graph at its insertion point, of the origin of another node.

    Args:
        graph: the graph.
        meta: of the other node.
    """

    def __init__(self, graph: fx.Graph, meta: dict[str, Any]) -> None:
        self._graph, self._meta = graph, meta

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta = {**self._meta, "val": recomputed_example(node)}
        return node

    def reshape(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        """The node in a shape; the node itself if it has this shape."""
        known = node.meta["val"].shape
        if len(known) == len(shape) and all(map(is_equal, known, shape)):
            return node
        return self(aten.reshape.default, node, [self.size(size) for size in shape])

    def size(self, size: int | torch.SymInt) -> Any:
        """A size as an argument of a node."""
        return size if isinstance(size, int) else size_node(self._graph, size)


def is_equal(size: Any, other: Any) -> bool:
    """Whether sizes are the same number or expression; comparing symbols would add guards."""
    return str(size) == str(other)
