"""Makes tensors that Dynamo stores as attributes of a graph, such as an optimizer's parameters and state, its inputs.

A trace would run in-place operators on such a tensor, and then treat it as a constant.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from lit_ort._compat.torch_fx import copy_nodes, graph_module_of, inputs_of, output_of


def attributes_as_inputs(graph_module: fx.GraphModule) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """Return the graph with its tensor attributes as further inputs, after the others, and these tensors."""
    attributes = [node for node in graph_module.graph.nodes if node.op == "get_attr"]
    if not any(isinstance(_attribute(graph_module, node), torch.Tensor) for node in attributes):
        return graph_module, ()
    graph = fx.Graph()
    graph.output(tuple(copy_nodes(graph_module.graph, graph, {}))).meta = dict(output_of(graph_module.graph).meta)
    inputs, tensors = dict[int, fx.Node](), list[torch.Tensor]()
    last = inputs_of(graph)[-1:]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        tensor = _attribute(graph_module, node)
        if not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) not in inputs:
            with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
                last = [graph.placeholder(node.name)]
            last[0].meta = dict(node.meta)
            inputs[id(tensor)] = last[0]
            tensors.append(tensor)
        node.replace_all_uses_with(inputs[id(tensor)])
        graph.erase_node(node)
    return graph_module_of(graph_module, graph), tuple(tensors)


def _attribute(module: fx.GraphModule, node: fx.Node) -> object:
    return operator.attrgetter(str(node.target))(module)
