"""Replaces nodes of a graph by others, with their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, is_element, recomputed_example, size_node

aten = torch.ops.aten


def replace_nodes(
    module: fx.GraphModule, is_replaced: Callable[[fx.Node], bool], make: Callable[[NodeBuilder, fx.Node], fx.Node]
) -> int:
    """Replaces nodes of a graph, in place. Returns their number.

    Args:
        module: the graph.
        is_replaced: whether a node is replaced.
        make: adds the nodes that compute a node's value, and returns the last one.
    """
    nodes = [node for node in module.graph.nodes if is_replaced(node)]
    for node in nodes:
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(make(NodeBuilder(module.graph, node.meta), node))
        module.graph.erase_node(node)
    return len(nodes)


def replace_elements(
    module: fx.GraphModule,
    is_replaced: Callable[[fx.Node], bool],
    make: Callable[[NodeBuilder, fx.Node, int, torch.Tensor], fx.Node],
) -> int:
    """Replaces nodes of several results in a graph, in place. Returns their number.

    Args:
        module: the graph.
        is_replaced: whether a node is replaced.
        make: adds the nodes that compute a result of a node, from its number and an example of it, and returns the last
            one. It is called for results that are read.
    """
    graph, fired = module.graph, 0
    for node in list(graph.nodes):
        if is_replaced(node) and all(map(is_element, node.users)):
            with graph.inserting_before(node):
                builder = NodeBuilder(graph, node.meta)
                for element in list(node.users):
                    element.replace_all_uses_with(make(builder, node, arguments_of(element)[1], element.meta["val"]))
                    graph.erase_node(element)
            graph.erase_node(node)
            fired += 1
    return fired


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
        if are_equal(known, shape):
            return node
        return self(aten.reshape.default, node, [self.size(size) for size in shape])

    def size(self, size: int | torch.SymInt) -> Any:
        """A size as an argument of a node."""
        return size if isinstance(size, int) else size_node(self._graph, size)


def are_equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sizes are the same numbers or expressions, and as many; comparing symbols would add guards."""
    return list(map(str, sizes)) == list(map(str, others))
