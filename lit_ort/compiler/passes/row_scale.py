"""Moves a scale of rows from a wide matrix to the small sides of the products that read it.

In:  `Mul(d[N, C], s[N, 1])`, read only by `Gemm(., b)`, `Gemm(., b, transA=1)` and sums over the rows, also through
     reshapes to other shapes and back
Out: `Mul(Gemm(d, b), s)`, `Gemm(d, Mul(b, s), transA=1)`, `Gemm(s, d, transA=1)`
Saves a pass over [N, C], which in a language model's loss is the size of the logits.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from lit_ort.compiler.passes.base import GraphPass, PassReport, shape_of

# Below, the scaled matrix is small enough that the extra nodes cost more than the pass over it.
LARGE = 2**20


class RowScale(GraphPass):
    name = "row_scale"

    def apply(self, model: ir.Model) -> PassReport:
        fired, declined = 0, []
        for node in list(model.graph):
            if node.op_type != "Mul" or node.domain:
                continue
            reason = _move(model.graph, node)
            if reason is None:
                fired += 1
            elif reason:
                declined.append(f"{node.name}: {reason}")
        if fired:
            common.RemoveUnusedNodesPass()(model)
            common.ShapeInferencePass()(model)
        return PassReport(self.name, fired, tuple(declined))


def _move(graph: ir.Graph, node: ir.Node) -> str | None:
    """Rewrites the readers of one scaled matrix. Returns why not, and an empty text where it is none."""
    matrix, scale = node.inputs
    assert matrix is not None
    assert scale is not None
    wide, tall = shape_of(matrix), shape_of(scale)
    if wide is None or tall is None or len(wide) != 2 or tall != (wide[0], 1) or wide[0] * wide[1] < LARGE:
        return ""
    readers = _readers(node.outputs[0], wide)
    if readers is None:
        return "its result is an output, or is read in another shape"
    unknown = next((reader for reader in readers if not _can_follow(reader)), None)
    if unknown is not None:
        return f"{unknown.name} ({unknown.op_type}) can't carry the scale"
    for reader in readers:
        _follow(graph, reader, matrix, scale)
    return None


def _readers(value: ir.Value, shape: tuple[int, ...]) -> list[ir.Node] | None:
    """The nodes that read `value` as a matrix of `shape`, seen through reshapes; None if anything else reads it."""
    if value.is_graph_output() or not value.uses():
        return None
    found: list[ir.Node] = []
    for reader, position in value.uses():
        if reader.op_type == "Reshape" and position == 0:
            behind = _readers(reader.outputs[0], shape)
            if behind is None:
                return None
            found.extend(behind)
        elif shape_of(value) == shape and position == 0:
            found.append(reader)
        else:
            return None
    return found


def _can_follow(reader: ir.Node) -> bool:
    if reader.op_type == "Gemm":
        plain = len(reader.inputs) == 2 and reader.attributes.get_float("alpha", 1.0) == 1.0
        tall = reader.attributes.get_int("transA", 0) == 1
        return plain and not (tall and reader.attributes.get_int("transB", 0))
    if reader.op_type == "ReduceSum" and len(reader.inputs) == 2 and not reader.attributes.get_int("keepdims", 1):
        axes = ir.convenience.get_const_tensor(reader.inputs[1]) if reader.inputs[1] is not None else None
        return axes is not None and axes.numpy().tolist() == [0]
    return False


def _follow(graph: ir.Graph, reader: ir.Node, matrix: ir.Value, scale: ir.Value) -> None:
    if reader.op_type == "ReduceSum":
        _sum_by_product(graph, reader, matrix, scale)
        return
    reader.replace_input_with(0, matrix)
    if reader.attributes.get_int("transA", 0):
        scaled = ir.node("Mul", [reader.inputs[1], scale], name=f"{reader.name}/row_scale")
        graph.insert_before(reader, scaled)
        reader.replace_input_with(1, scaled.outputs[0])
    else:
        product = reader.outputs[0]
        scaled = ir.node("Mul", [product, scale], name=f"{reader.name}/row_scale")
        graph.insert_after(reader, scaled)
        _replace(product, scaled.outputs[0], but=scaled)


def _sum_by_product(graph: ir.Graph, reader: ir.Node, matrix: ir.Value, scale: ir.Value) -> None:
    product = ir.node("Gemm", [scale, matrix], {"transA": 1}, name=f"{reader.name}/row_scale")
    shape = ir.Value(name=f"{reader.name}/row_scale/shape", const_value=ir.tensor([-1], dtype=ir.DataType.INT64))
    shape.dtype, shape.shape = ir.DataType.INT64, ir.Shape([1])
    graph.register_initializer(shape)
    flat = ir.node("Reshape", [product.outputs[0], shape], name=f"{reader.name}/row_scale/flat")
    graph.insert_before(reader, [product, flat])
    _replace(reader.outputs[0], flat.outputs[0], but=None)


def _replace(old: ir.Value, new: ir.Value, but: ir.Node | None) -> None:
    new.dtype, new.shape = old.dtype or ir.DataType.FLOAT, old.shape
    for user, position in list(old.uses()):
        if user is not but:
            user.replace_input_with(position, new)
    if old.is_graph_output():
        graph = old.graph
        assert graph is not None
        name, old.name = old.name, f"{old.name}/unscaled"
        graph.outputs[list(graph.outputs).index(old)] = new
        new.name = name
