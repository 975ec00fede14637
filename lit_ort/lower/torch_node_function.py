"""Writes a torch node of operators that have a short form in ONNX as a model-local function, beside those of regions.

Such nodes remain in steps that are otherwise native: models read their masks by indices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import onnx

from lit_ort.lower.onnx_values import FunctionNodes
from lit_ort.runtime.argument_codec import SLOT, is_constant
from lit_ort.runtime.program import AS_BYTES, AS_IS, TorchNode


def torch_node_function(node: TorchNode, name: str) -> onnx.FunctionProto | None:
    """The function of a torch node; None if it has an operator or an argument without a form."""
    if any(form not in (AS_IS, AS_BYTES) for form in (*node.inputs, *node.forms)):
        return None
    nodes, inputs = FunctionNodes(), [f"in{k}" for k in range(len(node.inputs))]
    # Booleans arrive as such, or as bytes of another torch node.
    values = [
        nodes.op("Cast", value, to=onnx.TensorProto.BOOL) if form == AS_BYTES else value
        for value, form in zip(inputs, node.inputs, strict=True)
    ]
    bools = {slot for slot, form in enumerate(node.inputs) if form == AS_BYTES}
    for statement in node.statements:
        form = _FORMS.get(statement.target)
        made = None if form is None or statement.kwargs else form(nodes, values, bools, *statement.args)
        if made is None:
            return None
        if int(statement.args[0][SLOT]) in bools:
            bools.add(len(values))
        values.append(made)
    outputs = []
    for slot, form in zip(node.outputs, node.forms, strict=True):
        to: dict[str, Any] = {"to": onnx.TensorProto.UINT8} if form == AS_BYTES else {}
        outputs.append(nodes.op("Cast" if to else "Identity", values[slot], **to))
    return nodes.function(name, inputs, outputs, "; ".join(statement.target for statement in node.statements))


def _reshape(nodes: FunctionNodes, values: Sequence[str], _: set[int], x: Any, shape: Any) -> str | None:
    return nodes.op("Reshape", values[int(x[SLOT])], nodes.integers(shape), allowzero=1) if is_constant(shape) else None


def _index(nodes: FunctionNodes, values: Sequence[str], bools: set[int], x: Any, indices: Any) -> str | None:
    """Elements at integers in the first dimensions."""
    if any(index is None or index[SLOT] in bools for index in indices):
        return None
    given = [values[int(index[SLOT])] for index in indices]
    total = given[0]
    for other in given[1:]:
        total = nodes.op("Add", total, other)
    shape, last = nodes.op("Shape", total), nodes.integers([-1])
    columns = [nodes.op("Unsqueeze", nodes.op("Expand", one, shape), last) for one in given]
    return nodes.op("GatherND", values[int(x[SLOT])], nodes.op("Concat", *columns, axis=-1))


# From the values of slots, the slots with booleans, and the arguments as `lit_ort.runtime.argument_codec` has them.
_FORMS: Mapping[str, Callable[..., str | None]] = MappingProxyType(
    {"aten.reshape.default": _reshape, "aten.index.Tensor": _index}
)
