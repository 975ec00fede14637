"""Inlines activation checkpoints into the FX graph, and marks each of their nodes for recomputation in the backward.

In:  one node for each `torch.utils.checkpoint.checkpoint(function, ...)`, which calls a separate graph, as Dynamo
     produces it
Out: the nodes of that graph, marked with the number of their checkpoint

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import mark_recomputed, must_recompute
from lit_ort._compat.torch_fx import graph_module_of, output_of

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def inline_checkpoints(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph in which checkpointed functions are inlined.

    A graph is returned unchanged if one of its checkpoints has a `context_fn`, since that selects saved tensors by
    torch's operators.
    """
    checkpoints = [node for node in graph_module.graph.nodes if node.target is CHECKPOINT]
    if not checkpoints or any(chooses_what_to_keep(graph_module, node) for node in checkpoints):
        return graph_module
    root, graph = torch.nn.Module(), fx.Graph()
    output = graph.output(_Inliner(root, graph).copy(graph_module, (), None))
    output.meta = dict(output_of(graph_module.graph).meta)
    graph.lint()
    return graph_module_of(root, graph)


def chooses_what_to_keep(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a checkpoint, or a checkpoint nested in it, has a `context_fn`."""
    body = _body(graph_module, node)
    inner = (node for node in body.graph.nodes if node.target is CHECKPOINT)
    return "_checkpoint_context_fn" in body.meta or any(chooses_what_to_keep(body, node) for node in inner)


def has_checkpoints(module: fx.GraphModule) -> bool:
    """Whether nodes of a traced graph are marked for recomputation in the backward."""
    return any(must_recompute(node) for node in module.graph.nodes)


class _Inliner:
    """Copies graphs into one new graph, whose attributes are stored in `root`."""

    def __init__(self, root: torch.nn.Module, graph: fx.Graph) -> None:
        self._root, self._graph = root, graph
        self._regions = 0
        self._attributes = 0

    def copy(self, module: fx.GraphModule, arguments: tuple[Any, ...], region: int | None) -> Any:
        """Appends the nodes of a graph to the new graph.

        Args:
            module: the graph to copy.
            arguments: values that replace its first inputs; the other inputs stay inputs.
            region: the number of the outermost checkpoint that contains the graph, or None.

        Returns:
            The results of the graph, as nodes of the new graph.
        """
        remaining = list(arguments)
        values: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder" and remaining:
                values[node] = remaining.pop(0)
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
            setattr(self._root, copied.target, operator.attrgetter(str(node.target))(module))
        elif region is not None and node.op != "placeholder":
            mark_recomputed(copied, region)
        return copied


def _body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    attribute = node.args[0]
    assert isinstance(attribute, fx.Node)
    body = operator.attrgetter(str(attribute.target))(module)
    assert isinstance(body, fx.GraphModule), "a checkpoint calls a graph"
    return body


def _is_body(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(operator.attrgetter(str(node.target))(module), fx.GraphModule)
