"""Expressions of elements that indices select: gathers, embeddings and their gradients, pads by a value's elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lit_ort._compat.torch_sizes import hint_of
from lit_ort.regions.element_types import name_of
from lit_ort.regions.node_expressions import Handler, along, shape_of, size_of_node
from lit_ort.regions.strided_views import StridedView, contiguous_strides
from lit_ort.regions.symbolic_size import Number, product
from lit_ort.regions.value_expressions import (
    Compute,
    Constant,
    Expression,
    NotRegional,
    Read,
    Take,
    Value,
    broadcast_shape,
    compared,
    is_all,
    reads_of,
    required,
    viewed,
)

if TYPE_CHECKING:
    from lit_ort.regions.graph_values import Reader

aten = torch.ops.aten

# The bytes of a gradient to which rows are added, in new memory or in a copy. By torch's operator and by a region one
# of 8 MB takes 0.74 and 0.74 ms, of 94 MB 4.8 and 7.4, of 154 MB 6.2 and 14.5 (Intel Xeon).
_MOST_BYTES_OF_TABLE, _MOST_BYTES_OF_COPY = 2**27, 2**24
# A region with the index along each axis has at most as many axes.
_MOST_AXES = 6
# Rows are added to a copy of a value of so many bytes, or of so many times those of the rows.
_FEW_BYTES, _MOST_COPIES = 2**16, 4
# Of a value of which an index changes a part, and which a region copies.
_MOST_BYTES_OF_PUT = 2**20


def taken(reader: Reader, node: fx.Node, x: Any, index: Expression, axis: int) -> Expression:
    """An element along an axis for each place of the other axes, or an element of a vector for each index."""
    source = reader.as_read(reader.of(x), node.name)
    assert source.value is not None
    others = tuple(stride for at, stride in enumerate(source.view.strides) if at != axis)
    view = StridedView(index.shape, others or (0,) * len(index.shape), source.view.offset)
    return Take(source.value, view, index, source.view.strides[axis], source.shape[axis], source.dtype)


def _padded_by_elements(index_of: Callable[[Expression, Number], Expression]) -> Handler:
    """The handler of pads whose elements are others of the value: `index_of` an index that can be outside of a size."""

    def handler(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        result, pads = reader.of(node.args[0]), node.args[1]
        assert isinstance(pads, list | tuple)
        for at in range(len(pads) // 2):
            axis, low = value.dim() - 1 - at, size_of_node(pads[2 * at])
            size = shape_of(value)[axis]
            index = Read(None, StridedView((size,), (1,), -low), "int64")
            shape = (*result.shape[:axis], size, *result.shape[axis + 1 :])
            result = selected(reader, node, result, shape, index_of(index, result.shape[axis]), axis)
        return result

    return handler


def nearest(index: Expression, size: Number) -> Expression:
    """An index, or the nearest one of `size` elements."""
    shape = index.shape
    low = Compute("maximum", (index, Constant(0, shape, "int64")), shape, "int64")
    return Compute("minimum", (low, Constant(size - 1, shape, "int64")), shape, "int64")


def _mirrored(index: Expression, size: Number) -> Expression:
    shape, last = index.shape, Constant(size - 1, index.shape, "int64")
    distance = Compute("sub", (last, Compute("abs", (index,), shape, "int64")), shape, "int64")
    return Compute("sub", (last, Compute("abs", (distance,), shape, "int64")), shape, "int64")


def _index(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """Elements of one axis, or of neighbouring axes together, by integers; negative ones count from the end."""
    source, indices = reader.as_read(reader.of(node.args[0]), node.name), node.args[1]
    assert isinstance(indices, list | tuple)
    given = {axis: index for axis, index in enumerate(indices) if index is not None}
    axes, shape = list(given), shape_of(value)
    if axes != list(range(axes[0], axes[0] + len(axes))) or 0 in source.shape:
        raise NotRegional("an index of axes that are no neighbours, or into nothing")
    parts = [_wrapped(reader, index, source.shape[axis]) for axis, index in given.items()]
    if len(parts) == 1:
        return selected(reader, node, source, shape, parts[0], axes[0])
    if any(source.view.strides[axis] < 0 for axis in axes):
        # Elements count from the first one in memory.
        source = reader.value(node.name, source).read()
    common = broadcast_shape(part.shape for part in parts)
    element: Expression = Constant(0, common, "int64")
    for axis, part in zip(axes, parts, strict=True):
        index = required(reader.broadcast(part, common), ("ge", 0), ("lt", source.shape[axis]))
        step = Compute("mul", (index, Constant(source.view.strides[axis], common, "int64")), common, "int64")
        element = Compute("add", (element, step), common, "int64")
    own = source.view.strides
    view = StridedView(shape, (*own[: axes[0]], *(0 for _ in common), *own[axes[-1] + 1 :]), source.view.offset)
    last = sum((source.shape[axis] - 1) * own[axis] for axis in axes)
    return _taken_at(reader, source, view, element, len(own) - axes[-1] - 1, 1, last + 1)


def _wrapped(reader: Reader, index: Any, size: Number) -> Expression:
    """An index of integers, negative ones counted from the end."""
    if not isinstance(index, fx.Node) or name_of(index.meta["val"].dtype) not in ("int64", "int32"):
        raise NotRegional("an index of booleans")
    given = reader.cast(reader.of(index), "int64")
    shape = given.shape
    negative = compared("lt", given, 0)
    wrapped = Compute("add", (given, Constant(size, shape, "int64")), shape, "int64")
    return Compute("where", (negative, wrapped, given), shape, "int64")


def _index_select(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    axis, index = node.args[1], reader.cast(reader.of(node.args[2]), "int64")
    assert isinstance(axis, int)
    if len(index.shape) != 1 or not value.dim():
        raise NotRegional("an index that is a number")
    return selected(reader, node, reader.of(node.args[0]), shape_of(value), index, axis % value.dim())


def selected(
    reader: Reader, node: fx.Node, x: Expression, shape: Sequence[Number], index: Expression, axis: int
) -> Expression:
    """The elements of x at an index along an axis, whose place the axes of the index take."""
    source = reader.as_read(x, node.name)
    own = source.view.strides
    strides = (*own[:axis], *(0 for _ in index.shape), *own[axis + 1 :])
    if source.shape[axis] == 0 or len(strides) != len(shape):
        raise NotRegional("an index into nothing")
    view = StridedView(tuple(shape), strides, source.view.offset)
    return _taken_at(reader, source, view, index, len(own) - axis - 1, own[axis], source.shape[axis])


def _taken_at(
    reader: Reader, source: Read, view: StridedView, index: Expression, behind: int, stride: Number, size: Number
) -> Expression:
    """Elements at a view and an index, behind whose axes are so many others."""
    assert source.value is not None
    for _ in range(behind):
        index = viewed(index, lambda view: view.insert(-1))
    return Take(source.value, view, reader.broadcast(index, view.shape), stride, size, source.dtype)


def _gather(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    source = reader.as_read(reader.of(node.args[0]), node.name)
    axis = node.args[1]
    if not isinstance(axis, int) or not value.dim() or not source.shape:
        raise NotRegional("a gather from a number, or of one")
    axis %= value.dim()
    assert source.value is not None
    index = reader.argument(node.args[2], shape_of(value), "int64")
    strides = tuple(0 if other == axis else stride for other, stride in enumerate(source.view.strides))
    view = StridedView(shape_of(value), strides, source.view.offset)
    return Take(source.value, view, index, source.view.strides[axis], source.shape[axis], source.dtype)


def _written_at(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """A value or a part in place of, or added to, the one element that an index selects along an axis, for each place.

    With several indices along the axis one could select what another does.
    """
    base, axis, index, part = reader.of(node.args[0]), node.args[1], reader.of(node.args[2]), node.args[3]
    shape, dtype = shape_of(value), name_of(value.dtype) or ""
    if not isinstance(axis, int) or not shape:
        raise NotRegional("a write into a number")
    axis %= len(shape)
    places = (*shape[:axis], 1, *shape[axis + 1 :])
    if index.shape != places or not isinstance(base, Constant) or node.kwargs:
        raise NotRegional("several writes of a row, or a write into what is known")
    if isinstance(part, fx.Node) and part.meta["val"].dim() and shape_of(part.meta["val"]) != places:
        raise NotRegional("a part of what is written")
    chosen = reader.broadcast(required(reader.cast(index, "int64"), ("ge", 0), ("lt", shape[axis])), shape)
    is_selected = Compute("eq", (along(shape, axis), chosen), shape, "bool")
    written: Expression = reader.argument(part, shape, dtype)
    if node.target is aten.scatter_add.default:
        written = Compute("add", (reader.broadcast(base, shape), written), shape, dtype)
    return Compute("where", (is_selected, written, reader.broadcast(base, shape)), shape, dtype)


def _put(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """A part in place of, or added to, the elements that a single index selects along an axis."""
    changed, given, part, *rest = node.args
    assert isinstance(given, list | tuple)
    axes = {at: index for at, index in enumerate(given) if isinstance(index, fx.Node)}
    base, shape, dtype = reader.of(changed), shape_of(value), name_of(value.dtype) or ""
    if not axes or not shape:
        raise NotRegional("no index, or one of a number")
    axis, index = next(iter(axes.items()))
    count = product(shape_of(index.meta["val"]))
    if len(axes) > 1 or index.meta["val"].dim() > 1 or count != 1:
        raise NotRegional("several indices")
    if not isinstance(base, Constant) and _bytes_of(value) > _MOST_BYTES_OF_PUT:
        raise NotRegional("a large value, which torch's operator changes in place")
    chosen = required(_wrapped(reader, index, shape[axis]), ("ge", 0), ("lt", shape[axis]))
    behind = shape[axis + 1 :]
    written = reader.argument(part, (*shape[:axis], *chosen.shape, *behind), dtype)
    if chosen.shape:
        chosen = viewed(chosen, lambda view: view.drop([0]))
    else:
        written = viewed(written, lambda view: view.insert(axis))
    is_selected = Compute("eq", (along(shape, axis), reader.broadcast(chosen, shape)), shape, "bool")
    old, written = reader.broadcast(base, shape), reader.broadcast(written, shape)
    if any(rest):
        written = Compute("add", (old, written), shape, dtype)
    return Compute("where", (is_selected, written, old), shape, dtype)


def _index_add(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """Parts along an axis, added to those that indices select."""
    base, axis, index, source = node.args[:4]
    assert isinstance(index, fx.Node)
    assert isinstance(source, fx.Node)
    if node.kwargs or not isinstance(axis, int) or value.dim() < 2 or index.meta["val"].dim() != 1:
        raise NotRegional("a scaled sum, or one of numbers")
    axis %= value.dim()
    places, rows = shape_of(source.meta["val"])[:-1], reader.of(index)
    for _ in places[axis + 1 :]:
        rows = viewed(rows, lambda view: view.insert(-1))
    return _added_rows(reader, node, value, axis, rows if axis >= len(places) else reader.broadcast(rows, places))


def _scatter_add(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """Rows that are added to those that an index selects, which is the same for all elements of a row."""
    base, axis, index, source = node.args[:4]
    assert isinstance(index, fx.Node)
    assert isinstance(source, fx.Node)
    if node.target is aten.scatter_reduce.two and node.args[4] != "sum":
        raise NotRegional(str(node.args[4]))
    # A zero that is not part of a sum doesn't change it.
    if not node.kwargs.get("include_self", True) and not _is_zero(reader.of(base)):
        raise NotRegional("sums that replace a value")
    rows = reader.of(index)
    if value.dim() < 2 or rows.shape != shape_of(source.meta["val"]) or not isinstance(axis, int):
        raise NotRegional("a part of what is added")
    if any(read.view.strides[-1] != 0 for read in reads_of(rows)):
        raise NotRegional("an index of each element")
    return _added_rows(reader, node, value, axis % value.dim(), viewed(rows, lambda view: view.select(-1, 0)))


def _added_rows(reader: Reader, node: fx.Node, value: torch.Tensor, axis: int, rows: Expression) -> Expression:
    """Rows of a source, added to those of a base of the same sizes but along one axis.

    Args:
        axis: not the last one.
        rows: the index along the axis of each row of the source.
    """
    base, source = node.args[0], node.args[3]
    shape, places = shape_of(value), rows.shape
    assert isinstance(source, fx.Node)
    of_source = shape_of(source.meta["val"])
    if axis == len(shape) - 1 or (*of_source[:axis], *of_source[axis + 1 :]) != (*shape[:axis], *shape[axis + 1 :]):
        raise NotRegional("a sum of elements")
    if _bytes_of(value) > _MOST_BYTES_OF_TABLE or sum(size != 1 for size in of_source) > _MOST_AXES:
        raise NotRegional("a large value, which torch's operator fills faster, or one of many axes")
    is_zero = _is_zero(reader.of(base))
    if not is_zero and _bytes_of(value) > max(_FEW_BYTES, _MOST_COPIES * _bytes_of(source.meta["val"])):
        raise NotRegional("few rows, which torch's operator adds in place")
    start = None if is_zero else _table(reader, node, base)
    number = reader.cast(rows, "int64")
    if len(places) > 1:
        index = required(number, ("ge", 0), ("lt", shape[axis]))
        number = Constant(0, places, "int64")
        for at, size in enumerate(shape[:-1]):
            scaled = Compute("mul", (number, Constant(size, places, "int64")), places, "int64")
            number = Compute("add", (scaled, index if at == axis else along(places, at)), places, "int64")
    return _scatter(reader, node, value, (source, number, -1), start)


def _is_zero(expression: Expression) -> bool:
    return isinstance(expression, Constant) and expression.number == 0


def _embedding(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    table = reader.as_read(reader.of(node.args[0]), node.name)
    assert table.value is not None
    shape = shape_of(value)
    index = viewed(reader.argument(node.args[1], shape[:-1], "int64"), lambda view: view.insert(-1))
    index = reader.broadcast(index, shape)
    strides = (*(0,) * (value.dim() - 1), table.view.strides[1])
    view = StridedView(shape, strides, table.view.offset)
    return Take(table.value, view, index, table.view.strides[0], table.shape[0], table.dtype)


def _embedding_gradient(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    gradient, indices, _, padding = node.args[:4]
    if len(node.args) > 4 and node.args[4]:
        raise NotRegional("a gradient scaled by the frequency of indices")
    if _bytes_of(value) > _MOST_BYTES_OF_TABLE:
        raise NotRegional("a large table, which torch's operator fills faster")
    return _scatter(reader, node, value, (gradient, _rows_of(reader, gradient, indices), padding), None)


def _embedding_gradient_onto(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    table, gradient, indices, padding = node.args
    start = _table(reader, node, table)
    return _scatter(reader, node, value, (gradient, _rows_of(reader, gradient, indices), padding), start)


def _rows_of(reader: Reader, gradient: Any, indices: Any) -> Expression:
    """The index of each row of a gradient."""
    return reader.argument(indices, shape_of(gradient.meta["val"])[:-1], "int64")


def _table(reader: Reader, node: fx.Node, table: Any) -> Value:
    """What rows are added to, in memory."""
    if _bytes_of(table.meta["val"]) > _MOST_BYTES_OF_COPY:
        raise NotRegional("a large table, which torch's operator changes in place")
    start = reader.as_read(reader.of(table), node.name)
    if not is_all(start):
        start = reader.value(node.name, start).read()
    assert start.value is not None
    if start.value.view.strides != contiguous_strides(start.value.shape):
        raise NotRegional("a table in another order of memory")
    return start.value


def _bytes_of(value: torch.Tensor) -> int:
    """The bytes of a value of the trace's sizes."""
    return math.prod(hint_of(size) or 0 for size in value.shape) * value.dtype.itemsize


def _scatter(
    reader: Reader, node: fx.Node, value: torch.Tensor, arguments: tuple[Any, Expression, Any], start: Value | None
) -> Expression:
    """Rows of a gradient, added to those of a table that indices select, but for the row `padding`."""
    gradient, rows, padding = arguments
    shape, dtype = shape_of(gradient.meta["val"]), name_of(value.dtype) or ""
    if len(shape) < 2 or shape[-1] == 1 or dtype not in ("float32", "float64"):
        raise NotRegional("a table of one column, or of 16-bit numbers, whose sums are rounded at each addition")
    added = reader.argument(gradient, shape, dtype)
    if padding >= 0:
        at = reader.broadcast(viewed(rows, lambda view: view.insert(-1)), shape)
        counted = compared("ne", at, padding)
        added = Compute("where", (counted, added, Constant(0.0, shape, dtype)), shape, dtype)
    result = Value(
        node.name, shape_of(value), dtype, "scatter", added, is_of_backward=reader.is_backward, rows=rows, start=start
    )
    reader.values.steps.append(result)
    return result.read()


def _either(first: Handler, second: Handler) -> Handler:
    """The expression of one of two handlers."""

    def handler(reader: Reader, node: fx.Node, value: torch.Tensor) -> Any:
        try:
            return first(reader, node, value)
        except NotRegional:
            return second(reader, node, value)

    return handler


INDEX_HANDLERS: dict[Any, Handler] = {
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    **dict.fromkeys((aten.scatter.src, aten.scatter.value), _written_at),
    aten.scatter_add.default: _either(_written_at, _scatter_add),
    aten.scatter_reduce.two: _scatter_add,
    aten.index_add.default: _index_add,
    aten.index_put.default: _put,
    **dict.fromkeys(
        (aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default),
        _padded_by_elements(nearest),
    ),
    **dict.fromkeys(
        (aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default),
        _padded_by_elements(_mirrored),
    ),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_gradient,
}

# The operators of lit_ort, by name.
OWN_INDEX_HANDLERS: dict[str, Handler] = {
    "lit_ort.embedding_gradient.default": _embedding_gradient,
    "lit_ort.embedding_gradient_onto.default": _embedding_gradient_onto,
}
