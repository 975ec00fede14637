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
from lit_ort.compiler.passes.base import NodePass, put_in_place


class TiedEmbedding(NodePass):
    name = "tied_embedding"

    def concerns(self, model: ir.Model, node: ir.Node) -> bool:
        return node.op_type in ("Sum", "Add") and not node.domain and _gradient_among(node) is not None

    def unproven(self, node: ir.Node) -> str | None:
        if len(node.inputs) != 2:
            return f"it adds {len(node.inputs)} gradients, and two are proven"
        gradient, held = _parts(node)
        producer = held.producer()
        if producer is None or not (kernel_of(producer) or "").startswith(linear_cross_entropy.NAME):
            return f"{held.name} does not come from an output layer's kernel"
        for value in (held, gradient.outputs[0]):
            if len(value.uses()) != 1 or value.is_graph_output():
                return f"{value.name} is read elsewhere"
        return None

    def replace(self, graph: ir.Graph, node: ir.Node) -> None:
        gradient, held = _parts(node)
        outputs = ((ir.DataType.FLOAT, node.outputs[0].shape),)
        put_in_place(graph, node, kernel_node(ONTO, [held, *gradient.inputs[1:]], outputs, str(node.name)))
        graph.remove(gradient, safe=True)
        # The result lives in the memory of `held`, which must not be planned as free; that of an output never is.
        graph.outputs.append(held)


def _gradient_among(node: ir.Node) -> ir.Node | None:
    """The embedding gradient that a sum adds."""
    producers = (value.producer() for value in node.inputs if value is not None)
    return next((producer for producer in producers if producer is not None and kernel_of(producer) == NAME), None)


def _parts(node: ir.Node) -> tuple[ir.Node, ir.Value]:
    """The embedding gradient of a sum of two, and the other value."""
    gradient = _gradient_among(node)
    assert gradient is not None
    held = next(value for value in reversed(node.inputs) if value is not gradient.outputs[0])
    assert held is not None
    return gradient, held
