"""Orders nodes so that less memory is held at a time.

In:  nodes in the order of the gradient builder, which computes the gradients of all weights at the end
Out: the same nodes; of those whose inputs are there, the one comes first that frees most memory, less what it takes
Saves activations and their gradients, which a weight's gradient needs and which else live until the end of the step.

Source: greedy list scheduling by memory; Sethi and Ullman 1970 have the optimum for trees.
"""

from __future__ import annotations

import onnx_ir as ir

from lit_ort.compiler.liveness import Liveness
from lit_ort.compiler.passes.base import GraphPass
from lit_ort.inspect import PassReport

# Splits a graph into forward and backward, which the training agent runs by themselves.
YIELD = "YieldOp"


class MemoryOrder(GraphPass):
    name = "memory_order"

    def apply(self, model: ir.Model) -> PassReport:
        nodes = list(model.graph)
        if any(node.op_type == YIELD for node in nodes):
            return PassReport(self.name, 0, ("the graph is split into forward and backward",))
        order = _ordered(model.graph, nodes)
        if order == nodes:
            return PassReport(self.name, 0)
        model.graph.remove(nodes)
        model.graph.extend(order)
        return PassReport(self.name, 1)


def _ordered(graph: ir.Graph, nodes: list[ir.Node]) -> list[ir.Node]:
    place = {node: k for k, node in enumerate(nodes)}
    waiting = {node: len(_predecessors(node)) for node in nodes}
    ready = [node for node in nodes if not waiting[node]]
    liveness = Liveness(graph)
    order: list[ir.Node] = []
    while ready:
        node = min(ready, key=lambda candidate: (liveness.grown_by(candidate), place[candidate]))
        ready.remove(node)
        liveness.run(node)
        order.append(node)
        for successor in {use.node for value in node.outputs for use in value.uses()}:
            waiting[successor] -= 1
            if not waiting[successor]:
                ready.append(successor)
    assert len(order) == len(nodes), "a graph has no cycles"
    return order


def _predecessors(node: ir.Node) -> set[ir.Node]:
    producers = (value.producer() for value in node.inputs if value is not None)
    return {producer for producer in producers if producer is not None}
