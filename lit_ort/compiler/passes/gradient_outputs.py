"""Adds the outputs that the gradient builder reads and the exporter leaves out.

In:  `Dropout -> y`, `LayerNormalization -> y`, `SoftmaxCrossEntropyLoss -> loss`
Out: `Dropout -> y, mask`, `LayerNormalization -> y, mean, inverse_std`, `SoftmaxCrossEntropyLoss -> loss, log_prob`
Saves nothing: without them there is no gradient.
"""

from __future__ import annotations

import onnx_ir as ir

from lit_ort.compiler.passes.base import GraphPass
from lit_ort.inspect import PassReport

OUTPUTS = {"SoftmaxCrossEntropyLoss": 2, "Dropout": 2, "LayerNormalization": 3}


class GradientOutputs(GraphPass):
    name = "gradient_outputs"
    required = True

    def apply(self, model: ir.Model) -> PassReport:
        fired = 0
        for node in model.graph:
            wanted = OUTPUTS.get(node.op_type, 0) if node.domain == "" else 0
            missing = range(len(node.outputs), wanted)
            if not missing:
                continue
            node.resize_outputs(wanted)
            for position in missing:
                _describe(node, position)
            fired += 1
        return PassReport(self.name, fired)


def _describe(node: ir.Node, position: int) -> None:
    output = node.outputs[position]
    output.name = f"{node.outputs[0].name}__{position}"
    data = node.inputs[0]
    assert data is not None
    if node.op_type == "Dropout":
        output.dtype = ir.DataType.BOOL
        output.shape = data.shape
    elif node.op_type == "LayerNormalization":
        output.dtype = ir.DataType.FLOAT
        axis = node.attributes.get_int("axis", -1)
        if data.shape is not None:
            kept = axis % len(data.shape)
            output.shape = ir.Shape([*data.shape[:kept], *(1 for _ in data.shape[kept:])])
    else:
        output.dtype = data.dtype or ir.DataType.FLOAT
        output.shape = data.shape
