"""Expressions of linear interpolations and of maximum pools along the last axis, with their gradients.

An element of an interpolation is the sum of its two neighbours, weighted by their distance from its place; the gradient
of an element is the sum over all places with the same weights. Images, whose places have two axes, are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lit_ort._compat.torch_sizes import hint_of
from lit_ort.regions.element_types import name_of
from lit_ort.regions.index_expressions import nearest, selected
from lit_ort.regions.node_expressions import Handler, along, shape_of
from lit_ort.regions.normalizations import Results
from lit_ort.regions.strided_views import StridedView
from lit_ort.regions.symbolic_size import Number
from lit_ort.regions.value_expressions import Compute, Constant, Expression, NotRegional, Read, compared, viewed

if TYPE_CHECKING:
    from lit_ort.regions.graph_values import Reader, Terms

aten = torch.ops.aten
_FLOATS = frozenset({"float32", "float64"})
# The gradient of an interpolation multiplies each element by the weights of all others of its row: 7 million times in
# 1.2 ms, where torch's operator takes 0.1 (AMD EPYC, AVX-512). A pool reads each element of a window.
_SHORT_ROW, _MOST_WEIGHTS, _MOST_TAPS = 8, 2**18, 16


def _interpolation(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """`upsample_linear1d(x, size, align_corners, scale)`."""
    x, (_, is_aligned, *scale) = reader.as_read(reader.of(node.args[0]), node.name), node.args[1:]
    size, count, dtype = *_sizes(x.shape[-1], value.shape[-1]), _float_of(value)
    index = Read(None, StridedView((count,), (1,)), "int64")
    first, second, distance = _neighbours(index, size, count, bool(is_aligned), scale, dtype)
    rest, shape = _minus(Constant(1.0, distance.shape, dtype), distance), shape_of(value)
    terms = []
    for place, weight in ((first, rest), (second, distance)):
        element = selected(reader, node, x, shape, place, len(shape) - 1)
        terms.append(Compute("mul", (element, reader.broadcast(weight, shape)), shape, dtype))
    return Compute("add", tuple(terms), shape, dtype)


def _interpolation_gradient(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """`upsample_linear1d_backward(grad, size, input_size, align_corners, scale)`."""
    grad, (_, _, is_aligned, *scale) = reader.of(node.args[0]), node.args[1:]
    size, count, dtype = *_sizes(value.shape[-1], grad.shape[-1]), _float_of(value)
    if size > _SHORT_ROW and count * math.prod(hint_of(one) or 1 for one in value.shape) > _MOST_WEIGHTS:
        raise NotRegional("long rows, for which torch's operator is faster")
    shape = (*shape_of(value), count)
    last = len(shape) - 1
    first, second, distance = _neighbours(along(shape, last), size, count, bool(is_aligned), scale, dtype)
    own, zero = along(shape, last - 1), Constant(0.0, shape, dtype)
    is_first, is_second = (Compute("eq", (own, place), shape, "bool") for place in (first, second))
    parts = (is_first, _minus(Constant(1.0, shape, dtype), distance)), (is_second, distance)
    weights = tuple(Compute("where", (is_one, weight, zero), shape, dtype) for is_one, weight in parts)
    given = reader.broadcast(viewed(grad, lambda view: view.insert(-2)), shape)
    term = Compute("mul", (given, Compute("add", weights, shape, dtype)), shape, dtype)
    is_read = Compute("logical_or", (is_first, is_second), shape, "bool")
    term = Compute("where", (is_read, term, zero), shape, dtype)
    return reader.reduction(node.name, "sum", term, [last], keep=False)


def _neighbours(
    index: Expression, size: int, count: int, is_aligned: bool, scale: Sequence[Any], dtype: str
) -> tuple[Expression, Expression, Expression]:
    """The two elements that each element of an interpolation is of, and the weight of the second one.

    Source: `compute_source_index_and_lambda` of ATen's UpSample.h, whose numbers are of the dtype.

    Args:
        index: int64, of the element.
        size, count: the numbers of elements, before and after.
    """
    if size == count:
        raise NotRegional("a copy")
    shape, number = index.shape, Compute("cast", (index,), index.shape, dtype)
    in_dtype = getattr(torch, dtype)
    if is_aligned:
        step = torch.tensor(size - 1, dtype=in_dtype) / max(1, count - 1)
        place = Compute("mul", (number, Constant(step.item(), shape, dtype)), shape, dtype)
    else:
        given = scale[0] if scale and scale[0] else None
        step = torch.tensor(1 / given if given else size, dtype=in_dtype) / (1 if given else count)
        half = Constant(0.5, shape, dtype)
        middle = Compute("add", (number, half), shape, dtype)
        scaled = Compute("mul", (middle, Constant(step.item(), shape, dtype)), shape, dtype)
        place = Compute("maximum", (_minus(scaled, half), Constant(0.0, shape, dtype)), shape, dtype)
    whole = Compute("cast", (Compute("floor", (place,), shape, dtype),), shape, "int64")
    first = _at_most(whole, size - 1)
    distance = _minus(place, Compute("cast", (first,), shape, dtype))
    distance = Compute("minimum", (distance, Constant(1.0, shape, dtype)), shape, dtype)
    return first, _at_most(_moved(first, 1), size - 1), distance


def _minus(left: Expression, right: Expression) -> Compute:
    return Compute("sub", (left, right), left.shape, left.dtype)


def _max_pool(
    terms: Terms,
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Results:
    """(the largest element of each window, its index)."""
    reader, node = terms.reader, terms.node
    values = reader.as_read(terms.given(x), node.name)
    taps, step, before = _window(values.shape, kernel, stride, padding, dilation)
    size, count = _sizes(values.shape[-1], node.meta["val"][0].shape[-1])
    shape, dtype = shape_of(node.meta["val"][0]), values.dtype
    start = Compute("mul", (along(shape, len(shape) - 1), Constant(step, shape, "int64")), shape, "int64")
    best: Expression = Constant(-math.inf, shape, dtype)
    place: Expression = Compute("maximum", (_moved(start, -before), Constant(0, shape, "int64")), shape, "int64")
    for tap in range(taps):
        index = _moved(start, tap - before)
        in_row = Read(None, StridedView((count,), (step,), tap - before), "int64")
        element = selected(reader, node, values, shape, nearest(in_row, size), len(shape) - 1)
        is_inside = Compute("logical_and", (compared("ge", index, 0), compared("lt", index, size)), shape, "bool")
        is_larger = Compute("gt", (element, best), shape, "bool")
        is_new = Compute("logical_or", (is_larger, Compute("isnan", (element,), shape, "bool")), shape, "bool")
        is_new = reader.value(node.name, Compute("logical_and", (is_inside, is_new), shape, "bool")).read()
        best = reader.value(node.name, Compute("where", (is_new, element, best), shape, dtype)).read()
        place = reader.value(node.name, Compute("where", (is_new, index, place), shape, "int64")).read()
    return best, place


def _max_pool_gradient(reader: Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """`max_pool2d_with_indices_backward(grad, x, kernel, stride, padding, dilation, ceil_mode, indices)`."""
    grad, _, kernel, stride, padding, dilation, _, places = node.args
    shape, dtype = shape_of(value), _float_of(value)
    taps, step, before = _window(shape, kernel, stride, padding, dilation)
    given, indices = reader.of(grad), reader.of(places)
    size, count = _sizes(shape[-1], given.shape[-1])
    own, last = along(shape, len(shape) - 1), len(shape) - 1
    row = Read(None, StridedView((size,), (1,), before), "int64")
    newest = Compute("floor_divide", (row, Constant(step, row.shape, "int64")), row.shape, "int64")
    total: Expression = Constant(0.0, shape, dtype)
    for window in range(-(-taps // step)):
        at = _moved(newest, -window)
        inside = Compute("logical_and", (compared("ge", at, 0), compared("lt", at, count)), at.shape, "bool")
        part, index = (selected(reader, node, one, shape, nearest(at, count), last) for one in (given, indices))
        is_own = Compute("eq", (index, own), shape, "bool")
        is_read = Compute("logical_and", (reader.broadcast(inside, shape), is_own), shape, "bool")
        part = Compute("where", (is_read, part, Constant(0.0, shape, dtype)), shape, dtype)
        total = Compute("add", (total, part), shape, dtype) if window else part
    return total


def _window(
    shape: Sequence[Number],
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> tuple[int, int, int]:
    """The elements of a window of a pool, the distance of windows, and the elements before the first one."""
    steps = stride or kernel
    taps, is_row = kernel[-1], all(part[0] == plain for part, plain in ((kernel, 1), (steps, 1), (padding, 0)))
    is_plain = is_row and len(kernel) == len(steps) == len(padding) == 2 and tuple(dilation) == (1, 1)
    if not is_plain or shape[-2] != 1 or not all(isinstance(one, int) for one in (taps, steps[-1], padding[-1])):
        raise NotRegional("a pool of images")
    if taps > _MOST_TAPS:
        raise NotRegional("long windows")
    return taps, steps[-1], padding[-1]


def _sizes(size: Any, count: Any) -> tuple[int, int]:
    if not isinstance(size, int) or not isinstance(count, int):
        raise NotRegional("sizes that change")
    return size, count


def _float_of(value: torch.Tensor) -> str:
    dtype = name_of(value.dtype)
    if dtype not in _FLOATS:
        raise NotRegional(f"{value.dtype}")
    return dtype


def _moved(index: Expression, distance: int) -> Expression:
    return Compute("add", (index, Constant(distance, index.shape, "int64")), index.shape, "int64")


def _at_most(index: Expression, most: int) -> Expression:
    return Compute("minimum", (index, Constant(most, index.shape, "int64")), index.shape, "int64")


RESAMPLING_HANDLERS: dict[Any, Handler] = {
    aten.upsample_linear1d.default: _interpolation,
    aten.upsample_linear1d_backward.default: _interpolation_gradient,
    aten.max_pool2d_with_indices_backward.default: _max_pool_gradient,
}
RESAMPLING_OPERATORS = {aten.max_pool2d_with_indices.default: _max_pool}
