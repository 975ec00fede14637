"""Computes the products of mixed precision in bfloat16.

In:  `Gemm(a, b (, bias))` with alpha and beta 1, `MatMul(a, b)` of matrices, or of stacks without broadcasting,
     `ATen(.., operator="lit_ort::attention..")` and `"..linear_cross_entropy.."`, in a place whose precision is
     bf16-mixed, products of at least `LARGE` floating-point operations
Out: `ATen(a, b (, bias), operator="lit_ort::bf16_gemm..")`, `"..bf16_matmul.."`, and the same kernels ending in `_bf16`
Saves three quarters of the products and of their gradients on CPUs with AMX, half on those with AVX-512 BF16.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from lit_ort.compiler.autocast import precision_of
from lit_ort.compiler.convert import place_of
from lit_ort.compiler.kernel_nodes import kernel_node, kernel_of, set_kernel
from lit_ort.compiler.kernels import attention, linear_cross_entropy
from lit_ort.compiler.kernels.bf16 import BF16, gemm_name, matmul_name
from lit_ort.compiler.passes.base import NodePass, put_in_place
from lit_ort.compiler.sizes import changes, product_of, reshape_to, sizes_of
from lit_ort.errors import ConvertError
from lit_ort.options import BF16_MIXED

# Below, calling the kernel takes longer than it saves.
LARGE = 2e6
_HEADS = (attention.NAME, linear_cross_entropy.NAME)


class Bf16Products(NodePass):
    name = "bf16_products"
    required = True

    def concerns(self, model: ir.Model, node: ir.Node) -> bool:
        return _is_product(node) and _wants_bf16(model, node)

    def unproven(self, node: ir.Node) -> str | None:
        if _is_kernel(node):
            return None
        a, b = node.inputs[:2]
        assert a is not None
        assert b is not None
        left, right = sizes_of(a), sizes_of(b)
        if left is None or right is None or min(len(left), len(right)) < 2:
            return f"shapes {a.shape} and {b.shape}: two or more known dimensions are needed"
        if len(right) == 2 < len(left) and (sum(map(changes, left[:-1])) > 1 or any(map(changes, right))):
            return f"several sizes of {a.shape} and {b.shape} change"
        if ir.DataType.FLOAT not in (a.dtype, node.outputs[0].dtype):
            return f"it computes in {a.dtype}, and float32 is proven"
        if a is b:
            return "both factors are one value, and the builder names gradients after values"
        if node.op_type == "MatMul" and len(right) > 2 and left[:-2] != right[:-2]:
            return f"the leading dimensions of {left} and {right} differ"
        attributes = node.attributes
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if any(attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
            return "alpha or beta is not 1"
        result = sizes_of(node.outputs[0])
        if result is None or (bias is not None and sizes_of(bias) != result[-1:]):
            return f"the result has shape {node.outputs[0].shape}" + (f", the bias {bias.shape}" if bias else "")
        operations = 2.0 * math.prod(result) * left[0 if attributes.get_int("transA", 0) else -1]
        return f"{operations:.1e} operations are fewer than {LARGE:.0e}" if operations < LARGE else None

    def replace(self, graph: ir.Graph, node: ir.Node) -> None:
        kernel = kernel_of(node)
        if kernel is not None:
            set_kernel(node, kernel + BF16)
            return
        a, b = node.inputs[:2]
        left, right = sizes_of(a), sizes_of(b)
        assert left is not None
        assert right is not None
        transposes = [bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB")]
        if len(right) == 2 and len(left) > 2:
            _replace_rows(graph, node, left, right)
            return
        stacked = len(left) > 2
        name = matmul_name(*transposes) if stacked else gemm_name(*transposes, bias=_has_bias(node))
        made = kernel_node(name, node.inputs, ((ir.DataType.FLOAT, node.outputs[0].shape),), str(node.name))
        put_in_place(graph, node, made)


def _is_product(node: ir.Node) -> bool:
    return _is_kernel(node) or (node.op_type in ("Gemm", "MatMul") and not node.domain)


def _is_kernel(node: ir.Node) -> bool:
    return (kernel_of(node) or "").startswith(_HEADS)


def _wants_bf16(model: ir.Model, node: ir.Node) -> bool:
    precision = precision_of(model, node)
    if precision is None:
        raise ConvertError(
            f"the graph has autocast regions, and {node.name} can't be told to be in one of them or not",
            remedy="Use one precision for the whole step, or keep the region out of it with torch.compiler.disable.",
            operator=node.op_type,
            module=place_of(node),
        )
    return precision == BF16_MIXED


def _has_bias(node: ir.Node) -> bool:
    return len(node.inputs) > 2 and node.inputs[2] is not None


def _replace_rows(graph: ir.Graph, node: ir.Node, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """A stack times one matrix is one matrix of all its rows times the other."""
    a, b = node.inputs
    assert a is not None
    assert a.shape is not None
    rows, columns = product_of(a.shape[:-1]), right[1]
    flat = _reshape(graph, a, [-1, left[-1]], ir.Shape([rows, left[-1]]), f"{node.name}/rows")
    product = kernel_node(
        gemm_name(False, False),
        [flat.outputs[0], b],
        ((ir.DataType.FLOAT, ir.Shape([rows, columns])),),
        f"{node.name}/product",
    )
    product.outputs[0].name = f"{node.outputs[0].name}__rows"
    shape = ir.Shape([*a.shape[:-1], columns])
    back = _reshape(graph, product.outputs[0], reshape_to((*left[:-1], columns)), shape, str(node.name))
    put_in_place(graph, node, back, flat, product)


def _reshape(graph: ir.Graph, data: ir.Value, sizes: list[int], shape: ir.Shape, name: str) -> ir.Node:
    wanted = ir.Value(name=f"{name}__shape", const_value=ir.tensor(sizes, dtype=ir.DataType.INT64))
    wanted.dtype, wanted.shape = ir.DataType.INT64, ir.Shape([len(sizes)])
    graph.register_initializer(wanted)
    node = ir.node("Reshape", [data, wanted], name=name)
    value = node.outputs[0]
    value.name, value.dtype, value.shape = f"{name}__value", ir.DataType.FLOAT, shape
    return node
