"""Drops products with one, which the gradient of a loss starts with.

In:  `Mul(x, 1.0)` or `Mul(1.0, x)`, the constant a scalar, also behind Identity
Out: `x`
Saves a copy of every gradient that a kernel already gave, the output layer's weight among them.
"""

from __future__ import annotations

import onnx_ir as ir

from lit_ort.compiler.passes.base import GraphPass
from lit_ort.inspect import PassReport


class UnitProduct(GraphPass):
    name = "unit_product"

    def apply(self, model: ir.Model) -> PassReport:
        outputs = set(model.graph.outputs)
        fired = 0
        for node in model.graph:
            factor = _factor_of_one(node)
            # A model's own input can't be handed out under another name, nor one value under two.
            if factor is None or (node.outputs[0] in outputs and (factor in outputs or factor.producer() is None)):
                continue
            _take_over(model.graph, node, factor)
            outputs = set(model.graph.outputs)
            fired += 1
        return PassReport(self.name, fired)


def _factor_of_one(node: ir.Node) -> ir.Value | None:
    if node.op_type != "Mul" or node.domain:
        return None
    for factor, constant in (node.inputs, reversed(node.inputs)):
        tensor = ir.convenience.get_const_tensor(_origin(constant)) if constant is not None else None
        if tensor is not None and tensor.shape.rank() == 0 and tensor.numpy().item() == 1.0:
            return factor
    return None


def _origin(value: ir.Value) -> ir.Value:
    node = value.producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _take_over(graph: ir.Graph, node: ir.Node, factor: ir.Value) -> None:
    product = node.outputs[0]
    name, is_output = product.name, product.is_graph_output()
    ir.convenience.replace_all_uses_with(product, factor, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    if is_output:
        factor.name = name
