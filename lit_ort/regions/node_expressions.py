"""The expression of each ATen operator that is one value of a region."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lit_ort.regions.element_types import is_float, name_of
from lit_ort.regions.pointwise_table import OPERATORS
from lit_ort.regions.strided_views import StridedView, contiguous_strides
from lit_ort.regions.symbolic_size import Number, Size, number_of, numbers_of, product, quotient
from lit_ort.regions.value_expressions import (
    Compute,
    Constant,
    Expression,
    NotRegional,
    Read,
    Take,
    Value,
    converted,
    is_all,
    shifted,
    viewed,
)

if TYPE_CHECKING:
    from lit_ort.regions.graph_values import Reader

aten, prims = torch.ops.aten, torch.ops.prims
# A concatenation of more parts is the library's: each point compares its index with all of them.
_MOST_PARTS = 4
# The bytes of a gradient to which rows are added, in new memory or in a copy. By torch's operator and by a region one
# of 8 MB takes 0.74 and 0.74 ms, of 94 MB 4.8 and 7.4, of 154 MB 6.2 and 14.5 (Intel Xeon).
_MOST_BYTES_OF_TABLE, _MOST_BYTES_OF_COPY = 2**27, 2**24


def size_of_node(arg: Any) -> Any:
    """A node that is a number of the trace's sizes as this number; everything else as it is."""
    value = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    return number_of(value) if isinstance(value, int | torch.SymInt) else arg


def shape_of(tensor: torch.Tensor) -> tuple[Number, ...]:
    return numbers_of(tensor.shape)


# Copies, which are the same value.
COPIES = frozenset({aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default})

Handler = Callable[["Reader", fx.Node, torch.Tensor], Expression]


def _view(make: Callable[..., StridedView | None]) -> Handler:
    """The handler of a view operator: `make` of a view and the node's other arguments; None if it is no view."""

    def handler(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        return _seen(reader, node, lambda view: make(view, *map(size_of_node, node.args[1:]), **node.kwargs))

    return handler


def _seen(reader: Reader, node: fx.Node, make: Callable[[StridedView], StridedView | None]) -> Expression:
    """A view of a node's first argument."""

    def view(given: StridedView) -> StridedView:
        made = make(given)
        if made is None:
            raise NotRegional("a reshape that is no view")
        return made

    source = reader.of(node.args[0])
    try:
        return viewed(source, view)
    except NotRegional:
        # The same view of the value itself.
        return viewed(reader.value(node.name, source).read(), view)


def _shaped(make: Callable[[StridedView, Sequence[Number]], StridedView | None]) -> Handler:
    """The handler of a view operator whose argument is the shape of the result."""

    def handler(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        return _seen(reader, node, lambda view: make(view, shape_of(value)))

    return handler


def _as_strided(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """A view of memory, if the memory is that of the trace; that of an input can be part of a larger one."""
    source, known = node.args[0], reader.of(node.args[0])
    assert isinstance(source, fx.Node)
    if not is_all(known) or known.value in reader.values.inputs.values():  # type: ignore[union-attr]
        raise NotRegional("memory that isn't a value's own")
    traced = source.meta["val"]
    layout = StridedView(shape_of(traced), numbers_of(traced.stride()), number_of(traced.storage_offset()))
    if layout.offset != 0 or layout.merged() != known.value.view.merged():  # type: ignore[union-attr]
        raise NotRegional("memory of another layout than that of the trace")
    offset = size_of_node(node.args[3]) if len(node.args) > 3 else None
    return replace(
        known, view=StridedView(shape_of(value), numbers_of(value.stride()), 0 if offset is None else offset)
    )


def _slice(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    given: tuple[Any, ...] = (*map(size_of_node, node.args[1:]), *(0, None, None, 1)[len(node.args) - 1 :])
    axis, start, step = given[0] % value.dim(), given[1], given[3]
    size, whole = shape_of(value)[axis], reader.of(node.args[0]).shape[axis]
    return _seen(reader, node, lambda view: view.narrow(axis, _first(start, whole), size, step))


def _first(start: Number | None, size: Number) -> Number:
    """The first element of a slice, whose start is cut to the elements that there are."""
    if start is None:
        return 0
    if isinstance(start, int) and isinstance(size, int):
        return range(size)[start:].start
    return start


def _transpose(view: StridedView, first: int, second: int) -> StridedView:
    order = list(range(len(view.shape)))
    if order:
        order[first], order[second] = order[second], order[first]
    return view.permute(order)


def _squeeze(view: StridedView, axes: int | Sequence[int] | None = None) -> StridedView:
    every = range(len(view.shape)) if axes is None else [axes] if isinstance(axes, int) else axes
    return view.drop(list(every)) if view.shape else view


def _same(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    return reader.of(node.args[0])


def _to(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    return converted(reader.of(node.args[0]), name_of(value.dtype) or "")


def _constant(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    name = str(node.target)
    position = 0 if "scalar_tensor" in name else 2 if "new_full" in name else 1
    number: Any = 0 if "zeros" in name else 1 if "ones" in name else size_of_node(node.args[position])
    if not isinstance(number, float | int | Size):
        raise NotRegional(name)
    return Constant(number, shape_of(value), name_of(value.dtype) or "")


def _arange(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    if "iota" in str(node.target):
        start, step = node.kwargs["start"], node.kwargs["step"]
    else:
        start, step = (0, 1) if len(node.args) == 1 else (node.args[0], node.args[2] if len(node.args) > 2 else 1)
    start, step = size_of_node(start), size_of_node(step)
    if not isinstance(start, int | Size) or not isinstance(step, int | Size):
        raise NotRegional(str(node.target))
    numbers = Read(None, StridedView(shape_of(value), (step,), start), "int64")
    return reader.cast(numbers, name_of(value.dtype) or "")


def _named(name: str, *defaults: Any) -> Handler:
    """The handler of an operator of the table whose last arguments have defaults."""

    def handler(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        if node.kwargs:
            raise NotRegional(f"{node.target} with {node.kwargs}")
        missing = len(node.args) - OPERATORS[name].formula.__code__.co_argcount
        return reader.compute(name, value, *node.args, *defaults[missing:] if missing < 0 else ())

    return handler


def _gelu(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    tanh = "_tanh" if node.kwargs.get("approximate", "none") == "tanh" else ""
    backward = "_backward" if "backward" in str(node.target) else ""
    return reader.compute(f"gelu{tanh}{backward}", value, *node.args)


def _valued(name: str) -> Handler:
    """The handler of an operator of the table whose last argument is `value`, a keyword."""
    return lambda reader, node, value: reader.compute(name, value, *node.args, node.kwargs.get("value", 1))


def _celu(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    x, alpha = (*node.args, 1.0)[:2]
    if not isinstance(alpha, float | int) or alpha == 0:
        raise NotRegional(f"celu with {alpha}")
    return reader.compute("elu", value, x, alpha, 1.0, 1 / alpha)


def _nan_to_num(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    if not value.is_floating_point():
        return reader.of(node.args[0])
    limits, shape, dtype = torch.finfo(value.dtype), shape_of(value), name_of(value.dtype) or ""
    result = x = reader.argument(node.args[0], shape, dtype)
    above, below = (Compute("eq", (x, Constant(bad, shape, dtype)), shape, "bool") for bad in (math.inf, -math.inf))
    tests = Compute("isnan", (x,), shape, "bool"), above, below
    given, defaults = (*node.args, None, None, None)[1:4], (0.0, limits.max, limits.min)
    for test, number, default in zip(tests, given, defaults, strict=True):
        other = reader.argument(default if number is None else number, shape, dtype)
        result = Compute("where", (test, other, result), shape, dtype)
    return result


def _triangle(relation: str) -> Handler:
    """The handler of `tril` and `triu`: what is kept where the column minus the row has a relation to the diagonal."""

    def handler(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        shape, dtype, rank = shape_of(value), name_of(value.dtype) or "", value.dim()
        diagonal = size_of_node((*node.args, 0)[1])
        offset = Compute("sub", (along(shape, rank - 1), along(shape, rank - 2)), shape, "int64")
        kept = Compute(relation, (offset, Constant(diagonal, shape, "int64")), shape, "bool")
        return Compute(
            "where", (kept, reader.argument(node.args[0], shape, dtype), Constant(0, shape, dtype)), shape, dtype
        )

    return handler


def _scaled(name: str) -> Handler:
    """add and sub, with their alpha."""

    def handler(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        dtype = name_of(value.dtype) or ""
        left, right = (reader.argument(arg, shape_of(value), dtype) for arg in node.args)
        alpha: Any = node.kwargs.get("alpha", 1)
        if alpha != 1:
            right = Compute("mul", (right, Constant(alpha, right.shape, dtype)), right.shape, dtype)
        return Compute(name, (left, right), shape_of(value), dtype)

    return handler


def _clamp(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    low, high = (*node.args[1:], None)[:2]
    if low is None:
        return reader.compute("minimum", value, node.args[0], high)
    name, limits = ("maximum", (low,)) if high is None else ("clamp", (low, high))
    return reader.compute(name, value, node.args[0], *limits)


def _pow(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    exponent, dtype = node.args[1], name_of(value.dtype) or ""
    shape = shape_of(value)
    base = reader.argument(node.args[0], shape, dtype)
    if exponent in (2, 3):
        square = Compute("mul", (base, base), shape, dtype)
        return square if exponent == 2 else Compute("mul", (square, base), shape, dtype)
    if exponent == 1:
        return base
    simple = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in simple and is_float(dtype):
        return Compute(simple[exponent], (base,), shape, dtype)  # type: ignore[index]
    return reader.compute("pow", value, *node.args)


def _reduce(kind: str) -> Handler:
    def handler(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        given, keep = (*node.args[1:], None, False)[:2] if len(node.args) != 2 else (node.args[1], False)
        axes = [given] if isinstance(given, int) else [a for a in given or () if isinstance(a, int)]  # type: ignore[union-attr]
        dtype = name_of(value.dtype) or ""
        dtype = "bool" if kind in ("any", "all") else dtype
        expression = converted(reader.of(node.args[0]), dtype)
        keep = bool(node.kwargs.get("keepdim", keep))
        if kind != "mean":
            return reader.reduction(node.name, kind, expression, axes, keep)
        total = reader.reduction(node.name, "sum", expression, axes, keep)
        count = quotient(product(expression.shape), product(total.shape))
        return Compute("div", (total, Constant(count, total.shape, dtype)), total.shape, dtype)

    return handler


def along(shape: Sequence[Number], axis: int) -> Expression:
    """The index along an axis."""
    return Read(None, StridedView(tuple(shape), tuple(int(at == axis) for at in range(len(shape)))), "int64")


def _between(shape: Sequence[Number], axis: int, start: Number, end: Number) -> Expression:
    """Whether the index along an axis is from `start` to below `end`."""
    index, shape = along(shape, axis), tuple(shape)
    low = Compute("ge", (index, Constant(start, shape, "int64")), shape, "bool")
    high = Compute("lt", (index, Constant(end, shape, "int64")), shape, "bool")
    if start == 0:
        return high
    return low if end == shape[axis] else Compute("logical_and", (low, high), shape, "bool")


def _placed(reader: Reader, node: fx.Node, part: Expression, axis: int, start: Number, base: Expression) -> Expression:
    """`base` with a part in place of its elements from `start` on along an axis."""
    size = part.shape[axis]
    if size == base.shape[axis]:
        return part
    inside = _between(base.shape, axis, start, start + size)
    moved = shifted(part, axis, start, base.shape[axis], inside)
    if moved is None:
        moved = shifted(reader.value(node.name, part).read(), axis, start, base.shape[axis], inside)
        assert moved is not None
    return Compute("where", (inside, moved, base), base.shape, base.dtype)


def _cat(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    axis = int(node.args[1] if len(node.args) > 1 else 0) % value.dim()  # type: ignore[arg-type]
    if any(part.meta["val"].dim() != value.dim() for part in parts):  # type: ignore[union-attr]
        raise NotRegional("a concatenation with empty parts")
    return joined(reader, node, value, [reader.of(part) for part in parts], axis)


def joined(reader: Reader, node: fx.Node, value: torch.Tensor, parts: Sequence[Expression], axis: int) -> Expression:
    if len(parts) > _MOST_PARTS:
        raise NotRegional("many parts")
    dtype = name_of(value.dtype) or ""
    start: Number = 0
    result: Expression = Constant(0, shape_of(value), dtype)
    for part in parts:
        result = _placed(reader, node, reader.cast(part, dtype), axis, start, result)
        start = start + part.shape[axis]
    return result


def _rolled(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """One dimension after the other: its last elements, then those before."""
    result = reader.of(node.args[0])
    shifts, axes = (list(map(size_of_node, part)) for part in (*node.args[1:], ())[:2])  # type: ignore[arg-type]
    sizes = [result.shape[axis] for axis in axes]
    if not axes or not all(isinstance(number, int) for number in (*shifts, *sizes)):
        raise NotRegional("a shift of all elements in their order, or by or along any size")
    for shift, size, axis in zip(shifts, sizes, axes, strict=True):
        if count := shift % size:
            result = reader.as_read(result, node.name)
            views = [result.view.narrow(axis, size - count, count), result.view.narrow(axis, 0, size - count)]
            parts = [replace(result, view=view) for view in views]
            result = joined(reader, node, value, parts, axis % value.dim())
    return result


def _padded(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    dtype = name_of(value.dtype) or ""
    result, pads = reader.of(node.args[0]), node.args[1]
    fill: Any = node.args[2] if len(node.args) > 2 else 0
    assert isinstance(pads, list | tuple)
    for at in range(len(pads) // 2):
        low, high = pads[2 * at : 2 * at + 2]
        if not isinstance(low, int) or not isinstance(high, int):
            raise NotRegional("pads that are sizes")
        axis = value.dim() - 1 - at
        start = max(low, 0)
        if low < 0 or high < 0:
            first, size = max(-low, 0), result.shape[axis] + min(low, 0) + min(high, 0)
            result = viewed(result, lambda view, axis=axis, first=first, size=size: view.narrow(axis, first, size))
        shape = (*result.shape[:axis], shape_of(value)[axis], *result.shape[axis + 1 :])
        result = _placed(reader, node, result, axis, start, Constant(fill, shape, dtype))
    return result


def taken(reader: Reader, node: fx.Node, x: Any, index: Expression, axis: int) -> Expression:
    """An element of each row of a matrix, or an element of a vector for each index."""
    source = reader.as_read(reader.of(x), node.name)
    assert source.value is not None
    rows = source.view.strides[:axis] or (0,)
    view = StridedView(index.shape, rows, source.view.offset)
    return Take(source.value, view, index, source.view.strides[axis], source.shape[axis], source.dtype)


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
    return _scatter(reader, node, value, (gradient, indices, padding), None)


def _embedding_gradient_onto(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    table, *rest = node.args
    if _bytes_of(value) > _MOST_BYTES_OF_COPY:
        raise NotRegional("a large table, which torch's operator changes in place")
    start = reader.as_read(reader.of(table), node.name)
    if not is_all(start):
        start = reader.value(node.name, start).read()
    assert start.value is not None
    if start.value.view.strides != contiguous_strides(start.value.shape):
        raise NotRegional("a table in another order of memory")
    return _scatter(reader, node, value, rest, start.value)


def _bytes_of(table: torch.Tensor) -> int:
    return math.prod(table.shape) * table.dtype.itemsize


def _scatter(
    reader: Reader, node: fx.Node, value: torch.Tensor, arguments: Sequence[Any], start: Value | None
) -> Expression:
    """Rows of a gradient, added to those of a table that indices select, but for the row `padding`."""
    gradient, indices, padding = arguments
    shape, dtype = shape_of(gradient.meta["val"]), name_of(value.dtype) or ""
    if len(shape) < 2 or shape[-1] == 1 or dtype not in ("float32", "float64"):
        raise NotRegional("a table of one column, or of 16-bit numbers, whose sums are rounded at each addition")
    rows = reader.argument(indices, shape[:-1], "int64")
    added = reader.argument(gradient, shape, dtype)
    if padding >= 0:
        at = reader.broadcast(viewed(rows, lambda view: view.insert(-1)), shape)
        counted = Compute("ne", (at, Constant(padding, shape, "int64")), shape, "bool")
        added = Compute("where", (counted, added, Constant(0.0, shape, dtype)), shape, dtype)
    result = Value(
        node.name, shape_of(value), dtype, "scatter", added, is_of_backward=reader.is_backward, rows=rows, start=start
    )
    reader.values.steps.append(result)
    return result.read()


def _masked_fill(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    shape, dtype = shape_of(value), name_of(value.dtype) or ""
    x, mask, fill = (
        reader.argument(arg, shape, kind) for arg, kind in zip(node.args, (dtype, "bool", dtype), strict=True)
    )
    return Compute("where", (mask, fill, x), shape, dtype)


def _stack(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    axis = int(node.args[1] if len(node.args) > 1 else 0) % value.dim()  # type: ignore[arg-type]
    return joined(
        reader, node, value, [viewed(reader.of(part), lambda view: view.insert(axis)) for part in parts], axis
    )


def _index(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """Elements of one axis by integers, negative ones counted from the end."""
    indices = node.args[1]
    assert isinstance(indices, list | tuple)
    (axis, given), *others = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if others or not isinstance(given, fx.Node) or name_of(given.meta["val"].dtype) not in ("int64", "int32"):
        raise NotRegional("an index of several axes, or of booleans")
    index = reader.cast(reader.of(given), "int64")
    size = Constant(shape_of(node.args[0].meta["val"])[axis], index.shape, "int64")  # type: ignore[union-attr]
    negative = Compute("lt", (index, Constant(0, index.shape, "int64")), index.shape, "bool")
    wrapped = Compute("add", (index, size), index.shape, "int64")
    return _selected(reader, node, value, Compute("where", (negative, wrapped, index), index.shape, "int64"), axis)


def _index_select(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    axis, index = node.args[1], reader.cast(reader.of(node.args[2]), "int64")
    assert isinstance(axis, int)
    if len(index.shape) != 1 or not value.dim():
        raise NotRegional("an index that is a number")
    return _selected(reader, node, value, index, axis % value.dim())


def _selected(reader: Reader, node: fx.Node, value: torch.Tensor, index: Expression, axis: int) -> Expression:
    source, shape = reader.as_read(reader.of(node.args[0]), node.name), shape_of(value)
    assert source.value is not None
    own = source.view.strides
    strides = (*own[:axis], *(0 for _ in index.shape), *own[axis + 1 :])
    if source.shape[axis] == 0 or len(strides) != len(shape):
        raise NotRegional("an index into nothing")
    for _ in own[axis + 1 :]:
        index = viewed(index, lambda view: view.insert(-1))
    view = StridedView(shape, strides, source.view.offset)
    return Take(source.value, view, reader.broadcast(index, shape), own[axis], source.shape[axis], source.dtype)


def _gather(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    source = reader.as_read(reader.of(node.args[0]), node.name)
    axis = node.args[1]
    if not isinstance(axis, int) or not value.dim():
        raise NotRegional("gather")
    axis %= value.dim()
    assert source.value is not None
    index = reader.argument(node.args[2], shape_of(value), "int64")
    strides = tuple(0 if other == axis else stride for other, stride in enumerate(source.view.strides))
    view = StridedView(shape_of(value), strides, source.view.offset)
    return Take(source.value, view, index, source.view.strides[axis], source.shape[axis], source.dtype)


HANDLERS: dict[Any, Handler] = {
    aten.view.default: _shaped(StridedView.reshape),
    aten._unsafe_view.default: _shaped(StridedView.reshape),
    aten.reshape.default: _shaped(StridedView.reshape),
    aten.permute.default: _view(StridedView.permute),
    aten.transpose.int: _view(_transpose),
    aten.t.default: _view(lambda view: view.permute(range(len(view.shape))[::-1])),
    aten.expand.default: _shaped(StridedView.expand),
    aten.unsqueeze.default: _view(StridedView.insert),
    aten.as_strided.default: _as_strided,
    aten.slice.Tensor: _slice,
    aten.select.int: _view(StridedView.select),
    **{target: _view(_squeeze) for target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)},
    **dict.fromkeys(COPIES, _same),
    aten._to_copy.default: _to,
    prims.convert_element_type.default: _to,
    **{
        target: _constant
        for target in (
            *(aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.new_full.default),
            *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default),
            *(aten.ones.default, aten.ones_like.default, aten.new_ones.default),
        )
    },
    **{
        target: _arange
        for target in (aten.arange.default, aten.arange.start, aten.arange.start_step, prims.iota.default)
    },
    aten.add.Tensor: _scaled("add"),
    aten.sub.Tensor: _scaled("sub"),
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu,
    aten.clamp.default: _clamp,
    aten.pow.Tensor_Scalar: _pow,
    aten.leaky_relu.default: _named("leaky_relu", 0.01),
    aten.softplus.default: _named("softplus", 1, 20),
    aten.elu.default: _named("elu", 1, 1, 1),
    aten.celu.default: _celu,
    aten.addcmul.default: _valued("addcmul"),
    aten.addcdiv.default: _valued("addcdiv"),
    aten.nan_to_num.default: _nan_to_num,
    aten.tril.default: _triangle("le"),
    aten.triu.default: _triangle("ge"),
    aten.hardtanh.default: _named("clamp", -1, 1),
    aten.sum.default: _reduce("sum"),
    aten.sum.dim_IntList: _reduce("sum"),
    aten.mean.default: _reduce("mean"),
    aten.mean.dim: _reduce("mean"),
    aten.amax.default: _reduce("max"),
    aten.amin.default: _reduce("min"),
    aten.any.dim: _reduce("any"),
    aten.any.default: _reduce("any"),
    aten.all.dim: _reduce("all"),
    aten.cat.default: _cat,
    aten.roll.default: _rolled,
    aten.stack.default: _stack,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.constant_pad_nd.default: _padded,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_gradient,
    aten.gather.default: _gather,
}

# The operators of lit_ort, by name.
OWN_HANDLERS: dict[str, Handler] = {
    "lit_ort.embedding_gradient.default": _embedding_gradient,
    "lit_ort.embedding_gradient_onto.default": _embedding_gradient_onto,
}
