"""ATen operators that are several values of a region: softmax, extremes, variances, with their gradients, and splits.

Each is a function of a `Terms`, which makes expressions, and of the node's arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lit_ort.regions.element_types import is_float
from lit_ort.regions.node_expressions import along, joined, seen_as, shape_of
from lit_ort.regions.normalizations import Results, mean_over
from lit_ort.regions.strided_views import StridedView
from lit_ort.regions.symbolic_size import Number, Size, product
from lit_ort.regions.value_expressions import Compute, Constant, Expression, NotRegional, compared, viewed

if TYPE_CHECKING:
    from lit_ort.regions.graph_values import Terms

aten = torch.ops.aten


def _largest_and_shares(terms: Terms, x: Expression, axis: int) -> tuple[Expression, Expression]:
    """(the largest element of each row, the softmax)."""
    most = terms.reduce("max", x, [axis])
    e = terms.apply("exp", terms.apply("sub", x, most))
    return most, terms.apply("mul", e, terms.apply("reciprocal", terms.row_total(e, axis)))


def softmax(terms: Terms, x: Any, axis: int, half_to_float: bool) -> Results:
    return (_largest_and_shares(terms, terms.given(x), axis)[1],)


def safe_softmax(terms: Terms, x: Any, axis: int, dtype: torch.dtype | None = None) -> Results:
    """A softmax that is zero in rows of nothing but -inf."""
    if dtype is not None:
        raise NotRegional("a softmax in another dtype")
    x = terms.given(x)
    most, y = _largest_and_shares(terms, x, axis)
    empty = compared("eq", most, -math.inf)
    is_empty = terms.reader.broadcast(empty, x.shape)
    return (Compute("where", (is_empty, Constant(0.0, y.shape, y.dtype), y), y.shape, y.dtype),)


def log_softmax(terms: Terms, x: Any, axis: int, half_to_float: bool) -> Results:
    x = terms.given(x)
    shifted = terms.apply("sub", x, terms.reduce("max", x, [axis]))
    total = terms.row_total(terms.apply("exp", shifted), axis)
    return (terms.apply("sub", shifted, terms.apply("log", total)),)


def softmax_backward(terms: Terms, grad: Any, y: Any, axis: int, dtype: torch.dtype) -> Results:
    product = terms.apply("mul", terms.given(grad), terms.given(y))
    total = terms.row_total(product, axis)
    return (terms.apply("sub", product, terms.apply("mul", terms.given(y), total)),)


def log_softmax_backward(terms: Terms, grad: Any, y: Any, axis: int, dtype: torch.dtype) -> Results:
    g = terms.given(grad)
    total = terms.row_total(g, axis)
    return (terms.apply("sub", g, terms.apply("mul", terms.apply("exp", terms.given(y)), total)),)


def _axes(x: Expression, axes: int | Sequence[int] | None) -> list[int]:
    """The axes of a reduction; all of them if none is named."""
    rank = len(x.shape)
    named = [axes] if isinstance(axes, int) else list(axes or ())
    return sorted(axis % rank for axis in named) if named and rank else list(range(rank))


def var_mean(terms: Terms, x: Any, axes: Sequence[int] | None = None, **kwargs: Any) -> Results:
    x = terms.given(x)
    over = _axes(x, axes)
    count = product(x.shape[axis] for axis in over)
    correction = kwargs.get("correction")
    mean = mean_over(terms, x, over)
    centred = terms.apply("sub", x, mean)
    if isinstance(correction, float) and not correction.is_integer():
        raise NotRegional(f"a variance with the correction {correction}")
    if isinstance(count, Size) and correction is not None and correction > 1:
        raise NotRegional("a variance whose number of elements a later size can bring below its correction")
    divisor = count - (1 if correction is None else int(correction))
    total = terms.reduce("sum", terms.apply("mul", centred, centred), over)
    variance = terms.apply("div", total, divisor if divisor > 0 else 0)
    results = variance, mean
    return results if kwargs.get("keepdim") else tuple(terms.squeezed(result, over) for result in results)


def var(terms: Terms, x: Any, axes: Sequence[int] | None = None, **kwargs: Any) -> Results:
    return var_mean(terms, x, axes, **kwargs)[:1]


def std(terms: Terms, x: Any, axes: Sequence[int] | None = None, **kwargs: Any) -> Results:
    return (terms.apply("sqrt", *var(terms, x, axes, **kwargs)),)  # type: ignore[arg-type]


def logsumexp(terms: Terms, x: Any, axes: int | Sequence[int], keepdim: bool = False) -> Results:
    x = terms.given(x)
    over = _axes(x, axes)
    most = terms.reduce("max", x, over)
    # Infinities have no difference.
    infinite = Compute("isinf", (most,), most.shape, "bool")
    shift = Compute("where", (infinite, Constant(0.0, most.shape, most.dtype), most), most.shape, most.dtype)
    total = terms.reduce("sum", terms.apply("exp", terms.apply("sub", x, shift)), over)
    result = terms.apply("add", terms.apply("log", total), shift)
    return (result if keepdim else terms.squeezed(result, over),)


def vector_norm(
    terms: Terms,
    x: Any,
    order: float = 2,
    axes: int | Sequence[int] | None = None,
    keepdim: bool = False,
    **kwargs: Any,
) -> Results:
    if order not in (1, 2, math.inf) or kwargs.get("dtype") is not None:
        raise NotRegional(f"a norm of order {order} or in another dtype")
    x = terms.given(x)
    over = _axes(x, axes)
    if order == 2:
        result = terms.apply("sqrt", terms.reduce("sum", terms.apply("mul", x, x), over))
    else:
        result = terms.reduce("sum" if order == 1 else "max", terms.apply("abs", x), over)
    return (result if keepdim else terms.squeezed(result, over),)


def norm(terms: Terms, x: Any, order: float | None, axes: Sequence[int], keepdim: bool = False) -> Results:
    return vector_norm(terms, x, 2 if order is None else order, axes, keepdim)


def _extreme(terms: Terms, kind: str, x: Any, axis: int, keepdim: bool) -> tuple[Expression, Expression]:
    """(the largest or smallest element along an axis, its first index); NaN is both."""
    given = terms.reader.of(x)
    shape = given.shape
    if not shape:
        raise NotRegional("an extreme of one number")
    axis %= len(shape)
    extreme = terms.reduce(kind, given, [axis])
    found = Compute("eq", (given, terms.reader.broadcast(extreme, shape)), shape, "bool")
    if is_float(given.dtype):
        found = Compute("logical_or", (found, Compute("isnan", (given,), shape, "bool")), shape, "bool")
    size = Constant(shape[axis], shape, "int64")
    index = terms.reduce("min", Compute("where", (found, along(shape, axis), size), shape, "int64"), [axis])
    return (extreme, index) if keepdim else (terms.squeezed(extreme, [axis]), terms.squeezed(index, [axis]))


def _extreme_and_index(kind: str) -> Callable[..., Results]:
    return lambda terms, x, axis, keepdim=False: _extreme(terms, kind, x, axis, keepdim)


def _index_of_extreme(kind: str) -> Callable[..., Results]:
    def operator_of(terms: Terms, x: Any, axis: int | None = None, keepdim: bool = False) -> Results:
        if axis is None:
            raise NotRegional("an index among all elements")
        return _extreme(terms, kind, x, axis, keepdim)[1:]

    return operator_of


def aminmax(terms: Terms, x: Any, *, dim: int | None = None, keepdim: bool = False) -> Results:
    given = terms.reader.of(x)
    over = _axes(given, dim)
    results = [terms.reduce(kind, given, over) for kind in ("min", "max")]
    return tuple(result if keepdim else terms.squeezed(result, over) for result in results)


def nansum(terms: Terms, x: Any, axes: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Results:
    given = terms.given(x)
    if dtype is not None:
        raise NotRegional("a sum in another dtype")
    over, shape = _axes(given, axes), given.shape
    missing = Compute("isnan", (given,), shape, "bool")
    known = Compute("where", (missing, Constant(0.0, shape, given.dtype), given), shape, given.dtype)
    result = terms.reduce("sum", known, over)
    return (result if keepdim else terms.squeezed(result, over),)


def count_nonzero(terms: Terms, x: Any, axes: int | Sequence[int] | None = None) -> Results:
    given = terms.reader.of(x)
    over, counted = _axes(given, axes), terms.reader.cast(compared("ne", given, 0), "int64")
    return (terms.squeezed(terms.reduce("sum", counted, over), over),)


def trace(terms: Terms, x: Any) -> Results:
    diagonal = seen_as(terms.reader, terms.node, terms.given(x), StridedView.diagonal)
    return (terms.squeezed(terms.reduce("sum", diagonal, [0]), [0]),)


def _limits(terms: Terms, eps: float) -> tuple[float, float]:
    """(eps, 1 - eps), each rounded to the dtype of the result, as torch does."""
    low = torch.tensor(eps, dtype=terms.node.meta["val"].dtype)
    return low.item(), (1 - low).item()


def logit(terms: Terms, x: Any, eps: float | None = None) -> Results:
    x = terms.given(x)
    x = x if eps is None else terms.apply("clamp", x, *_limits(terms, eps))
    return (terms.apply("log", terms.apply("div", x, terms.apply("rsub", x, 1.0))),)


def logit_backward(terms: Terms, grad: Any, x: Any, eps: float | None = None) -> Results:
    x = terms.given(x)
    low, high = (0.0, 1.0) if eps is None else _limits(terms, eps)
    outside = Compute("logical_or", (compared("lt", x, low), compared("gt", x, high)), x.shape, "bool")
    slope = terms.apply("div", terms.given(grad), terms.apply("mul", x, terms.apply("rsub", x, 1.0)))
    flat = Constant(math.nan if eps is None else 0.0, x.shape, x.dtype)
    return (Compute("where", (outside, flat, slope), x.shape, x.dtype),)


def log_sigmoid(terms: Terms, x: Any) -> Results:
    """(the result; exp(-|x|), which torch keeps for the gradient)."""
    x = terms.given(x)
    return terms.apply("log_sigmoid", x), terms.apply("exp", terms.apply("neg", terms.apply("abs", x)))


def log_sigmoid_backward(terms: Terms, grad: Any, x: Any, kept: Any) -> Results:
    return (terms.apply("mul", terms.given(grad), terms.apply("sigmoid", terms.apply("neg", terms.given(x)))),)


def _where_positive(terms: Terms, x: Expression, positive: Expression, rest: Expression) -> Expression:
    shape, dtype = rest.shape, rest.dtype
    test = compared("gt", x, 0.0)
    positive = terms.reader.broadcast(positive, shape)
    return Compute("where", (terms.reader.broadcast(test, shape), positive, rest), shape, dtype)


def prelu(terms: Terms, x: Any, weight: Any) -> Results:
    x = terms.given(x)
    return (_where_positive(terms, x, x, terms.apply("mul", x, terms.given(weight))),)


def prelu_backward(terms: Terms, grad: Any, x: Any, weight: Any) -> Results:
    g, x = terms.given(grad), terms.given(x)
    of_weight = terms.apply("mul", g, x)
    nothing = Constant(0.0, of_weight.shape, of_weight.dtype)
    of_input = _where_positive(terms, x, g, terms.apply("mul", g, terms.given(weight)))
    return of_input, _where_positive(terms, x, nothing, of_weight)


def _halves(terms: Terms, x: Any, axis: int) -> tuple[int, Expression, Expression]:
    """The axis, and the two halves of a value along it."""
    given = terms.given(x)
    axis %= len(given.shape)
    size = given.shape[axis]
    if not isinstance(size, int):
        raise NotRegional("halves of a changing size")
    half = size // 2
    first, second = (viewed(given, lambda view, at=at: view.narrow(axis, at, half)) for at in (0, half))
    return axis, first, second


def glu(terms: Terms, x: Any, axis: int = -1) -> Results:
    _, value, gate = _halves(terms, x, axis)
    return (terms.apply("mul", value, terms.apply("sigmoid", gate)),)


def glu_backward(terms: Terms, grad: Any, x: Any, axis: int) -> Results:
    axis, value, gate = _halves(terms, x, axis)
    g, open_share = terms.given(grad), terms.apply("sigmoid", gate)
    of_value = terms.apply("mul", g, open_share)
    of_gate = terms.apply("mul", terms.apply("mul", of_value, value), terms.apply("rsub", open_share, 1.0))
    return (joined(terms.reader, terms.node, terms.node.meta["val"], [of_value, of_gate], axis),)


def split(terms: Terms, x: Any, sizes: Any, axis: int = 0) -> tuple[Expression, ...]:
    source = terms.reader.of(x)
    axis %= len(source.shape)
    parts: list[Expression] = []
    start: Number = 0
    for part in terms.node.meta["val"]:
        size = shape_of(part)[axis]
        parts.append(viewed(source, lambda view, start=start, size=size: view.narrow(axis, start, size)))
        start = start + size
    return tuple(parts)


def unbind(terms: Terms, x: Any, axis: int = 0) -> tuple[Expression, ...]:
    source = terms.reader.of(x)
    count = len(terms.node.meta["val"])
    return tuple(viewed(source, lambda view, at=at: view.select(axis, at)) for at in range(count))


ROW_OPERATORS: dict[Any, Callable[..., Results]] = {
    aten._softmax.default: softmax,
    aten._safe_softmax.default: safe_softmax,
    aten._log_softmax.default: log_softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten.var_mean.correction: var_mean,
    aten.var.correction: var,
    aten.std.correction: std,
    aten.logsumexp.default: logsumexp,
    aten.linalg_vector_norm.default: vector_norm,
    aten.norm.ScalarOpt_dim: norm,
    aten.max.dim: _extreme_and_index("max"),
    aten.min.dim: _extreme_and_index("min"),
    aten.argmax.default: _index_of_extreme("max"),
    aten.argmin.default: _index_of_extreme("min"),
    aten.aminmax.default: aminmax,
    aten.nansum.default: nansum,
    aten.count_nonzero.default: count_nonzero,
    aten.count_nonzero.dim_IntList: count_nonzero,
    aten.trace.default: trace,
    aten.logit.default: logit,
    aten.logit_backward.default: logit_backward,
    aten.log_sigmoid_forward.default: log_sigmoid,
    aten.log_sigmoid_backward.default: log_sigmoid_backward,
    aten._prelu_kernel.default: prelu,
    aten._prelu_kernel_backward.default: prelu_backward,
    aten.glu.default: glu,
    aten.glu_backward.default: glu_backward,
    aten.split_with_sizes.default: split,
    aten.split.Tensor: split,
    aten.unbind.int: unbind,
}
