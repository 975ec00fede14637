"""Activation checkpoints in an FX graph: their functions stand in the graph, each operation marked with its checkpoint.

Dynamo hands over `torch.utils.checkpoint.checkpoint(function, ...)` as one node that calls a graph of its own.

Source: Chen et al. 2016, training deep nets with sublinear memory cost.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import mark_recomputed, must_recompute
from lit_ort._compat.torch_fx import output_of

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def inline_checkpoints(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A graph without nodes that call checkpointed functions.

    A checkpoint with a `context_fn`, which decides by torch's operators what is kept, leaves the graph as it is.
    """
    called = [node for node in graph_module.graph.nodes if node.target is CHECKPOINT]
    if not called or any(chooses_what_to_keep(graph_module, node) for node in called):
        return graph_module
    root, graph = torch.nn.Module(), fx.Graph()
    made = graph.output(_Inliner(root, graph).copy(graph_module, (), None))
    made.meta = dict(output_of(graph_module.graph).meta)
    graph.lint()
    return fx.GraphModule(root, graph)


def chooses_what_to_keep(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a checkpoint, or one inside it, has a `context_fn`."""
    body = _body(graph_module, node)
    inner = (node for node in body.graph.nodes if node.target is CHECKPOINT)
    return "_checkpoint_context_fn" in body.meta or any(chooses_what_to_keep(body, node) for node in inner)


def has_checkpoints(module: fx.GraphModule) -> bool:
    """Whether nodes of a traced graph are marked to be computed again in the backward."""
    return any(must_recompute(node) for node in module.graph.nodes)


class _Inliner:
    def __init__(self, root: torch.nn.Module, graph: fx.Graph) -> None:
        self._root, self._graph = root, graph
        self._regions = 0
        self._attributes = 0

    def copy(self, module: fx.GraphModule, arguments: tuple[Any, ...], region: int | None) -> Any:
        """Copies a graph's nodes to the end of the new one.

        Args:
            arguments: what takes the place of the first inputs; the others stay inputs.
            region: the outermost checkpoint around them.

        Returns:
            what the graph returns, in nodes of the new one.
        """
        given = list(arguments)
        values: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder" and given:
                values[node] = given.pop(0)
            elif node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            elif node.target is CHECKPOINT:
                inner = tuple(fx.map_arg(argument, values.__getitem__) for argument in node.args[1:])
                values[node] = self.copy(_body(module, node), inner, region or self._next_region())
            elif node.target is operator.getitem and isinstance(values.get(node.args[0]), (tuple, list)):
                values[node] = values[node.args[0]][node.args[1]]
            elif not _is_body(module, node):
                values[node] = self._copy_node(module, node, values, region)
        raise AssertionError("a graph ends with its output")

    def _next_region(self) -> int:
        self._regions += 1
        return self._regions

    def _copy_node(
        self, module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], region: int | None
    ) -> fx.Node:
        copied = self._graph.node_copy(node, values.__getitem__)
        if node.op == "get_attr":
            copied.target = f"constant_{self._attributes}"
            self._attributes += 1
            setattr(self._root, copied.target, _attribute(module, str(node.target)))
        elif region is not None and node.op != "placeholder":
            mark_recomputed(copied, region)
        return copied


def _body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    called = node.args[0]
    assert isinstance(called, fx.Node)
    body = _attribute(module, str(called.target))
    assert isinstance(body, fx.GraphModule), "a checkpoint calls a graph"
    return body


def _is_body(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(_attribute(module, str(node.target)), fx.GraphModule)


def _attribute(module: fx.GraphModule, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), module)
