"""Draws dropout's masks with torch, because those that ONNX Runtime draws in one run depend on each other.

In:  `Dropout(x, ratio, training_mode) -> y, mask` with a constant training_mode of true, and its
     `DropoutGrad(dy, mask, ratio, training_mode)`, float32
Out: `ATen(x, ratio, operator="lit_ort::dropout") -> y, mask` and `ATen(dy, mask, ratio, operator="..dropout_gradient")`
Saves most of dropout's time as well: ONNX Runtime draws one element after the other on one thread.
"""

from __future__ import annotations

import onnx_ir as ir

from lit_ort.compiler.kernel_nodes import kernel_node
from lit_ort.compiler.kernels.dropout import DROPOUT, DROPOUT_GRADIENT
from lit_ort.compiler.passes.base import NodePass, put_in_place


class TorchDropout(NodePass):
    name = "torch_dropout"
    required = True

    def concerns(self, model: ir.Model, node: ir.Node) -> bool:
        return node.op_type == "Dropout" and not node.domain

    def unproven(self, node: ir.Node) -> str | None:
        data = node.inputs[0]
        if data is None or data.dtype not in (None, ir.DataType.FLOAT):
            return f"its data is {data.dtype if data else None}, and float32 is proven"
        mode = node.inputs[2] if len(node.inputs) > 2 else None
        constant = ir.convenience.get_const_tensor(mode) if mode is not None else None
        if constant is None or not constant.numpy().item():
            return "it does not drop, or not always"
        mask = node.outputs[1] if len(node.outputs) > 1 else None
        if mask is not None and (
            mask.is_graph_output() or any(use.node.op_type != "DropoutGrad" for use in mask.uses())
        ):
            return "its mask is read by more than its gradient"
        return None

    def replace(self, graph: ir.Graph, node: ir.Node) -> None:
        data, ratio = node.inputs[:2]
        shape = node.outputs[0].shape
        outputs = ((ir.DataType.FLOAT, shape), (ir.DataType.UINT8, shape))
        result = kernel_node(DROPOUT, [data, ratio], outputs, str(node.name))
        mask = result.outputs[1]
        mask.name = f"{node.outputs[0].name}__kept"
        for use in node.outputs[1].uses() if len(node.outputs) > 1 else ():
            gradient = use.node
            given = (gradient.inputs[0], mask, ratio)
            replacement = kernel_node(DROPOUT_GRADIENT, given, outputs[:1], str(gradient.name))
            put_in_place(graph, gradient, replacement)
        put_in_place(graph, node, result)
