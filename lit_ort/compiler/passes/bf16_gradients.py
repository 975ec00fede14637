"""Writes the gradients of products in bfloat16 as products.

In:  `ATen(dy, a, b, operator="lit_ort::bf16_gemm.._gradient")`, `"..bf16_matmul.._gradient"` -> da, db (, dbias)
Out: a `bf16_gemm..` or `bf16_matmul..` kernel for each of da and db that is read, `ATen(dy, operator="..bf16_row_sum")`
Saves the gradients that nobody reads, and lets a pass round each factor once.
"""

from __future__ import annotations

import onnx_ir as ir

from lit_ort.compiler.kernel_nodes import kernel_node, kernel_of
from lit_ort.compiler.kernels.bf16 import GRADIENT, ROW_SUM, gemm_name, matmul_name
from lit_ort.compiler.passes.base import GraphPass
from lit_ort.inspect import PassReport

_NAMES = {make(a, b): (make, a, b) for make in (gemm_name, matmul_name) for a in (False, True) for b in (False, True)}


class Bf16Gradients(GraphPass):
    name = "bf16_gradients"
    required = True

    def apply(self, model: ir.Model) -> PassReport:
        fired = 0
        for node in list(model.graph):
            kernel = (kernel_of(node) or "").removesuffix(GRADIENT).removesuffix("_bias")
            if kernel in _NAMES and (kernel_of(node) or "").endswith(GRADIENT):
                _replace(model.graph, node, kernel)
                fired += 1
        return PassReport(self.name, fired)


def _replace(graph: ir.Graph, node: ir.Node, kernel: str) -> None:
    name, transpose_a, transpose_b = _NAMES[kernel]
    gradient, a, b = node.inputs
    # With A and B for what is multiplied: dA = dY B^T and dB = A^T dY, transposed where the factor is.
    of_a = (name(transpose_b, True), b, gradient) if transpose_a else (name(False, not transpose_b), gradient, b)
    of_b = (name(True, transpose_a), gradient, a) if transpose_b else (name(not transpose_a, False), a, gradient)
    calls = (of_a, of_b, (ROW_SUM, gradient))
    made: dict[ir.Value, ir.Node] = {}
    for position, output in enumerate(node.outputs):
        if output.name and (output.uses() or output.is_graph_output()):
            operator, *given = calls[position]
            factor = (a, b)[position] if position < 2 else None
            shape = output.shape if factor is None else factor.shape
            made[output] = kernel_node(operator, given, ((ir.DataType.FLOAT, shape),), f"{node.name}/{position}")
    values = [product.outputs[0] for product in made.values()]
    ir.convenience.replace_nodes_and_values(graph, node, [node], list(made.values()), list(made), values)
