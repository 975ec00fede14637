"""The expression of each ATen operator that is one value of a region."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lit_ort._compat.torch_ops import SCATTERS
from lit_ort.regions.element_types import computed_in, is_float, name_of, stored
from lit_ort.regions.pointwise_table import OPERATORS
from lit_ort.regions.strided_views import StridedView
from lit_ort.regions.symbolic_size import Number, Size, number_of, numbers_of, product, quotient, shape_numbers
from lit_ort.regions.value_expressions import (
    Compute,
    Constant,
    Expression,
    NotRegional,
    Read,
    compared,
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


def size_of_node(arg: Any) -> Any:
    """A node that is a number of the trace's sizes as this number; everything else as it is."""
    value = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    return number_of(value) if isinstance(value, int | torch.SymInt) else arg


def shape_of(tensor: torch.Tensor) -> tuple[Number, ...]:
    return shape_numbers(tensor.shape)


# Copies, which are the same value.
COPIES = frozenset({aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default})
_IN_FORMAT = "lit_ort.in_memory_format.default"

Handler = Callable[["Reader", fx.Node, torch.Tensor], Expression]


def _view(make: Callable[..., StridedView | None]) -> Handler:
    """The handler of a view operator: `make` of a view and the node's other arguments; None if it is no view."""

    def handler(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        return _seen(reader, node, lambda view: make(view, *map(size_of_node, node.args[1:]), **node.kwargs))

    return handler


def _seen(reader: Reader, node: fx.Node, make: Callable[[StridedView], StridedView | None]) -> Expression:
    """A view of a node's first argument."""

    return seen_as(reader, node, reader.of(node.args[0]), make)


def seen_as(
    reader: Reader, node: fx.Node, source: Expression, make: Callable[[StridedView], StridedView | None]
) -> Expression:
    """A view of an expression, or of the expression as a value of its own."""

    def view(given: StridedView) -> StridedView:
        made = make(given)
        if made is None:
            raise NotRegional("a reshape that is no view")
        return made

    try:
        return viewed(source, view)
    except NotRegional:
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
    return start + size if start < 0 else start


def _transpose(view: StridedView, first: int, second: int) -> StridedView:
    order = list(range(len(view.shape)))
    if order:
        order[first], order[second] = order[second], order[first]
    return view.permute(order)


def _windows(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    axis, size, step = map(size_of_node, node.args[1:])
    if value.dim() == 1:
        raise NotRegional("a window of one number")
    count = shape_of(value)[:-1][axis]
    return _seen(reader, node, lambda view: view.windows(axis, size, step, count))


def _repeated(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """A value with an axis for the copies before each of its own, which then become one axis."""
    times = [size_of_node(count) for count in node.args[1]]  # type: ignore[union-attr]

    def copies(view: StridedView) -> StridedView:
        shape: list[Number] = []
        for _ in range(len(times) - len(view.shape)):
            view = view.insert(0)
        for axis, count in enumerate(times):
            shape += [count, view.shape[2 * axis]]
            view = view.insert(2 * axis)
        return view.expand(shape)

    shape = shape_of(value)
    return seen_as(reader, node, _seen(reader, node, copies), lambda view: view.reshape(shape))


def _squeeze(view: StridedView, axes: int | Sequence[int] | None = None) -> StridedView:
    every = range(len(view.shape)) if axes is None else [axes] if isinstance(axes, int) else axes
    return view.drop(list(every)) if view.shape else view


def is_copy(node: fx.Node) -> bool:
    """Whether a node is its input, in another order of memory or not."""
    return node.target in COPIES or str(node.target) == _IN_FORMAT


def _same(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    return reader.of(node.args[0])


def _in_format(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    if node.args[1] is False:
        raise NotRegional("a conversion for an operator that reads contiguous memory")
    return _same(reader, node, value)


def _to(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    return converted(reader.of(node.args[0]), name_of(value.dtype) or "")


def _constant(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    name = str(node.target)
    position = 0 if "scalar_tensor" in name else 2 if "new_full" in name else 1
    number: Any = 0 if "zeros" in name else 1 if "ones" in name else size_of_node(node.args[position])
    if not isinstance(number, float | int | Size):
        raise NotRegional(name)
    dtype = name_of(value.dtype) or ""
    return Constant(stored(number, dtype), shape_of(value), dtype)


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
    above, below = (compared("eq", x, bad) for bad in (math.inf, -math.inf))
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
        kept = compared(relation, offset, diagonal)
        return Compute(
            "where", (kept, reader.argument(node.args[0], shape, dtype), Constant(0, shape, dtype)), shape, dtype
        )

    return handler


def _scaled(name: str) -> Handler:
    """add and sub, with their alpha."""

    def handler(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        dtype = name_of(value.dtype) or ""
        left, right = (reader.argument_in_memory(arg, shape_of(value), dtype) for arg in node.args)
        alpha: Any = size_of_node(node.kwargs.get("alpha", 1))
        if not isinstance(alpha, int | float | Size):
            raise NotRegional(f"alpha {alpha!r}")
        if alpha != 1:
            # Only the sum is rounded to 16 bits.
            computed = computed_in(dtype)
            right = Compute(
                "mul", (right, Constant(stored(alpha, dtype), right.shape, computed)), right.shape, computed
            )
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
        # The mean of 16-bit floats is rounded once, and so may exceed their range before.
        expression = converted(reader.of(node.args[0]), computed_in(dtype) if kind == "mean" else dtype)
        keep = bool(node.kwargs.get("keepdim", keep))
        if kind != "mean":
            return reader.reduction(node.name, kind, expression, axes, keep)
        total = reader.reduction(node.name, "sum", expression, axes, keep)
        count = quotient(product(expression.shape), product(total.shape))
        mean = Compute("div", (total, Constant(count, total.shape, total.dtype)), total.shape, total.dtype)
        return converted(mean, dtype)

    return handler


def along(shape: Sequence[Number], axis: int) -> Expression:
    """The index along an axis."""
    return Read(None, StridedView(tuple(shape), tuple(int(at == axis) for at in range(len(shape)))), "int64")


def _between(shape: Sequence[Number], axis: int, start: Number, end: Number) -> Expression:
    """Whether the index along an axis is from `start` to below `end`."""
    index, shape = along(shape, axis), tuple(shape)
    low, high = compared("ge", index, start), compared("lt", index, end)
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


def _with_selected(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """A part in place of the elements at an index along an axis."""
    given = [size_of_node(arg) for arg in node.args]
    part, axis, index = given[-3:] if _is_scatter(node) else (given[0], *given[2:])
    written = _part(reader, node, part)
    base = _base(reader, node, value, written)
    axis %= value.dim()
    start = index + base.shape[axis] if index < 0 else index
    part = viewed(written, lambda view: view.insert(axis))
    return _placed(reader, node, reader.cast(part, base.dtype), axis, start, base)


def _with_slice(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """As `_with_selected`, of neighbouring elements."""
    given = [*map(size_of_node, node.args), *(0, None, None, 1)[len(node.args) - 2 :]]
    part = _part(reader, node, node.args[int(_is_scatter(node))])
    base = _base(reader, node, value, part)
    axis, start, _, step = given[2:]
    axis %= value.dim()
    if step != 1:
        raise NotRegional("every other element")
    return _placed(reader, node, reader.cast(part, base.dtype), axis, _first(start, base.shape[axis]), base)


def _part(reader: Reader, node: fx.Node, arg: Any) -> Expression:
    """What is written; not as elements of a larger value, which could not be written to in place before."""
    part = reader.of(arg)
    is_of_larger = isinstance(part, Read) and part.value is not None and not is_all(part)
    return reader.value(node.name, part).read() if is_of_larger else part


def _is_scatter(node: fx.Node) -> bool:
    return "scatter" in str(node.target)


def _base(reader: Reader, node: fx.Node, value: torch.Tensor, part: Expression) -> Expression:
    """What a part is written into: zeros, another constant, or what has been written to one if the part is a constant.

    The last is how encoder-decoders shift their labels.
    """
    if not _is_scatter(node):
        return Constant(0, shape_of(value), name_of(value.dtype) or "")
    base = reader.of(node.args[0])
    is_shift = isinstance(part, Constant) and _is_written_once(reader, node.args[0])
    if not isinstance(base, Constant) and not is_shift:
        raise NotRegional("a write into known elements, which torch's operator does in place")
    return base


def _is_written_once(reader: Reader, base: Any) -> bool:
    """Whether a region computes a base from a constant."""
    expression = reader.of(base)
    is_computed = isinstance(expression, Read) and expression.value is not None and expression.value.kind != "given"
    return base.target in SCATTERS and is_computed and isinstance(reader.of(base.args[0]), Constant)


def _added_slices(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """A value or zeros, with parts added to neighbouring elements along an axis each."""
    base, given, _, axes, starts, _, steps = node.args
    parts: Any = given
    bounds: Any = zip(axes, map(size_of_node, starts), strict=True)  # type: ignore[arg-type]
    if len(parts) > _MOST_PARTS or any(step != 1 for step in steps):  # type: ignore[union-attr]
        raise NotRegional("many parts, or every other element")
    shape, dtype = shape_of(value), name_of(value.dtype) or ""
    nothing = Constant(0, shape, dtype)
    result: Expression = nothing if base is None else reader.argument(base, shape, dtype)
    if isinstance(result, Read) and result.value is not None and result.value.kind == "given":
        raise NotRegional("a result of torch, to which its operator adds in place")
    for part, (axis, start) in zip(parts, bounds, strict=True):
        axis %= value.dim()
        added = _placed(reader, node, reader.cast(reader.of(part), dtype), axis, _first(start, shape[axis]), nothing)
        result = added if result is nothing else Compute("add", (result, added), shape, dtype)
    return result


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


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _shaped(StridedView.reshape)),
    aten.permute.default: _view(StridedView.permute),
    aten.transpose.int: _view(_transpose),
    aten.t.default: _view(lambda view: view.permute(range(len(view.shape))[::-1])),
    aten.expand.default: _shaped(StridedView.expand),
    aten.unsqueeze.default: _view(StridedView.insert),
    aten.as_strided.default: _as_strided,
    aten.slice.Tensor: _slice,
    aten.select.int: _view(StridedView.select),
    **dict.fromkeys((aten.diagonal.default, aten.diagonal_copy.default), _view(StridedView.diagonal)),
    aten.flip.default: _view(StridedView.flip),
    aten.unfold.default: _windows,
    aten.repeat.default: _repeated,
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
    aten.max.default: _reduce("max"),
    aten.min.default: _reduce("min"),
    aten.any.dim: _reduce("any"),
    aten.any.default: _reduce("any"),
    aten.all.dim: _reduce("all"),
    aten.cat.default: _cat,
    aten.roll.default: _rolled,
    aten.stack.default: _stack,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.constant_pad_nd.default: _padded,
    **dict.fromkeys((aten.select_backward.default, aten.select_scatter.default), _with_selected),
    **dict.fromkeys((aten.slice_backward.default, aten.slice_scatter.default), _with_slice),
}

# The operators of lit_ort, by name.
OWN_HANDLERS: dict[str, Handler] = {"lit_ort.add_slices.default": _added_slices, _IN_FORMAT: _in_format}
