"""Nodes that call torch kernels: how they are made and told from others."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from lit_ort.compiler.kernels.torch_call import NAME, TorchCall, call_of
from lit_ort.runtime.aten import DOMAIN, NAMESPACE

OPERATOR = "ATen"


def operator_of(node: ir.Node) -> str | None:
    """The `operator` of an ATen node, such as `lit_ort::dropout`; None of any other node."""
    return node.attributes.get_string("operator", "") if node.op_type == OPERATOR else None


def kernel_of(node: ir.Node) -> str | None:
    """Name of the kernel that a node calls, such as `dropout`; None where it calls none."""
    operator = operator_of(node)
    return operator.removeprefix(NAMESPACE) if operator and operator.startswith(NAMESPACE) else None


def call_at(node: ir.Node) -> TorchCall | None:
    """The call of torch's operator that a node is; None of any other node."""
    return call_of(node.attributes.get_string("overload_name", "")) if kernel_of(node) == NAME else None


def set_kernel(node: ir.Node, kernel: str) -> None:
    """Lets an ATen node call another kernel that takes the same inputs."""
    node.attributes["operator"] = ir.AttrString("operator", NAMESPACE + kernel)


def kernel_node(
    kernel: str, inputs: Sequence[ir.Value | None], outputs: Sequence[tuple[ir.DataType, ir.Shape | None]], name: str
) -> ir.Node:
    """A node that calls a kernel.

    Args:
        kernel: its name.
        inputs: its values, in order.
        outputs: type and shape of each result; ATen nodes have no shape inference of their own.
        name: of the node.
    """
    attributes = _attributes(kernel)
    node = ir.node(OPERATOR, inputs, attributes, domain=DOMAIN, num_outputs=len(outputs), name=name, version=1)
    for value, (dtype, shape) in zip(node.outputs, outputs, strict=True):
        value.dtype, value.shape = dtype, shape
    return node


def call_kernel(op, kernel: str, inputs: Sequence[ir.Value], outputs: Sequence[ir.Shape | None]):  # type: ignore[no-untyped-def]
    """The same inside a rewrite rule: float32 results of these shapes, one or several.

    op: what the rule's `rewrite` is given.
    """
    made = op.ATen(*inputs, **_attributes(kernel), _domain=DOMAIN, _version=1, _outputs=len(outputs))
    results = (made,) if len(outputs) == 1 else tuple(made)
    for value, shape in zip(results, outputs, strict=True):
        value.dtype, value.shape = ir.DataType.FLOAT, shape
    return made


def _attributes(kernel: str) -> dict[str, str]:
    return {"operator": NAMESPACE + kernel, "overload_name": ""}
