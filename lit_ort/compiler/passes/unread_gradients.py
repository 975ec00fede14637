"""Tells kernels that give gradients beside their result which of them nobody reads.

In:  `ATen(.., settings, ..) -> loss, gradient, gradient, gradient`, where frozen parameters, or validation, leave
     gradients without a reader
Out: the same node with other `settings`
Saves the products of those gradients.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from lit_ort.compiler.kernel_nodes import kernel_of
from lit_ort.compiler.kernels.linear_cross_entropy import LOSS, NAME, SETTINGS, settings
from lit_ort.compiler.passes.base import GraphPass
from lit_ort.inspect import PassReport


class UnreadGradients(GraphPass):
    name = "unread_gradients"

    def apply(self, model: ir.Model) -> PassReport:
        fired = 0
        for node in model.graph:
            if (kernel_of(node) or "").startswith(NAME):
                fired += _settle(model, node)
        return PassReport(self.name, fired)


def _settle(model: ir.Model, node: ir.Node) -> int:
    given = node.inputs[SETTINGS]
    assert given is not None
    constant = ir.convenience.get_const_tensor(given)
    assert constant is not None
    before = constant.numpy().tolist()
    read = tuple(bool(value.uses()) or value.is_graph_output() for value in node.outputs)
    wanted = (read[1], read[2], read[3])
    after = settings(before[0], bool(before[1]), wanted)
    if after == before:
        return 0
    name = f"{node.outputs[LOSS].name}__settings"
    replacement = ir.Value(name=name, const_value=ir.tensor(np.array(after, dtype=np.int64), name=name))
    replacement.dtype, replacement.shape = ir.DataType.INT64, ir.Shape([len(after)])
    model.graph.register_initializer(replacement)
    node.replace_input_with(SETTINGS, replacement)
    return 1
