"""Adds the gradient of an embedding table onto the one that the output layer with the same weight already made.

In:  `Sum(ATen(shape, indices, gradient, operator="lit_ort::embedding_gradient"), held)`, `held` a result of
     `lit_ort::linear_cross_entropy..`, each read by the sum alone
Out: `ATen(held, indices, gradient, operator="lit_ort::embedding_gradient_onto")`, and `held` among the model's outputs
Saves two tables, of three, and four passes over one.
"""

from __future__ import annotations

import onnx_ir as ir

from lit_ort.compiler.kernel_nodes import kernel_node, kernel_of
from lit_ort.compiler.kernels import linear_cross_entropy
from lit_ort.compiler.kernels.embedding import NAME, ONTO
from lit_ort.compiler.passes.base import GraphPass
from lit_ort.inspect import PassReport


class TiedEmbedding(GraphPass):
    name = "tied_embedding"

    def apply(self, model: ir.Model) -> PassReport:
        fired, declined = 0, []
        for node in list(model.graph):
            gradient = _gradient_among(node)
            if gradient is None:
                continue
            reason = _unproven(node, gradient)
            if reason is None:
                _replace(model.graph, node, gradient)
                fired += 1
            else:
                declined.append(f"{node.name}: {reason}")
        return PassReport(self.name, fired, tuple(declined))


def _gradient_among(node: ir.Node) -> ir.Node | None:
    """The embedding gradient that a sum adds."""
    if node.op_type not in ("Sum", "Add") or node.domain:
        return None
    producers = (value.producer() for value in node.inputs if value is not None)
    return next((producer for producer in producers if producer is not None and kernel_of(producer) == NAME), None)


def _unproven(node: ir.Node, gradient: ir.Node) -> str | None:
    if len(node.inputs) != 2:
        return f"it adds {len(node.inputs)} gradients, and two are proven"
    held = _held(node, gradient)
    producer = held.producer()
    if producer is None or not (kernel_of(producer) or "").startswith(linear_cross_entropy.NAME):
        return f"{held.name} does not come from an output layer's kernel"
    for value in (held, gradient.outputs[0]):
        if len(value.uses()) != 1 or value.is_graph_output():
            return f"{value.name} is read elsewhere"
    return None


def _held(node: ir.Node, gradient: ir.Node) -> ir.Value:
    first, second = node.inputs
    held = second if first is gradient.outputs[0] else first
    assert held is not None
    return held


def _replace(graph: ir.Graph, node: ir.Node, gradient: ir.Node) -> None:
    held, result = _held(node, gradient), node.outputs[0]
    kernel = kernel_node(ONTO, [held, *gradient.inputs[1:]], ((ir.DataType.FLOAT, result.shape),), str(node.name))
    ir.convenience.replace_nodes_and_values(graph, node, [node], [kernel], [result], kernel.outputs)
    graph.remove(gradient, safe=True)
    # The result lives in the memory of `held`, which must not be planned as free; that of an output never is.
    graph.outputs.append(held)
