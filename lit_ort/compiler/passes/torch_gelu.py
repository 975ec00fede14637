"""Computes GELU and its gradient with torch kernels.

In:  `Gelu(x)`, `FastGelu(x)`, `GeluGrad(dy, x)`, `FastGeluGrad(dy, x)`, float32, of at least `LARGE` elements
Out: `ATen(x, operator="lit_ort::gelu..")`, `ATen(dy, x, operator="lit_ort::gelu.._gradient")`
Saves nine tenths of the gradient with tanh, and half of the exact one, which ONNX Runtime computes on one thread or in
several visits.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from lit_ort.compiler.kernel_nodes import kernel_node
from lit_ort.compiler.kernels.gelu import EXACT, TANH, gelu_name
from lit_ort.compiler.passes.base import MICROSOFT, NodePass, put_in_place
from lit_ort.compiler.sizes import sizes_of

KERNELS = {
    "Gelu": gelu_name(EXACT),
    "FastGelu": gelu_name(TANH),
    "GeluGrad": gelu_name(EXACT, gradient=True),
    "FastGeluGrad": gelu_name(TANH, gradient=True),
}
# Below, calling the kernel takes longer than it saves.
LARGE = 2**14


class TorchGelu(NodePass):
    name = "torch_gelu"

    def concerns(self, model: ir.Model, node: ir.Node) -> bool:
        return node.op_type in KERNELS and node.domain in ("", MICROSOFT)

    def unproven(self, node: ir.Node) -> str | None:
        x = node.inputs[-1]
        wanted = 2 if node.op_type.endswith("Grad") else 1
        if len(node.inputs) != wanted or x is None:
            return "it adds a bias"
        if node.domain == "" and node.attributes.get_string("approximate", EXACT) != EXACT:
            return "it is approximate, and is translated for its gradient elsewhere"
        if x.dtype != ir.DataType.FLOAT:
            return f"its data is {x.dtype}, and float32 is proven"
        shape = sizes_of(x)
        if shape is None or math.prod(shape) < LARGE:
            return f"its data of shape {x.shape} is smaller than {LARGE} elements"
        return None

    def replace(self, graph: ir.Graph, node: ir.Node) -> None:
        x = node.inputs[-1]
        assert x is not None
        kernel = kernel_node(KERNELS[node.op_type], node.inputs, ((ir.DataType.FLOAT, x.shape),), str(node.name))
        put_in_place(graph, node, kernel)
