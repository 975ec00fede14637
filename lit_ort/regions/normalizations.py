"""Layer and batch normalization with their gradients, as values of regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lit_ort._compat.torch_sizes import inverse_order
from lit_ort.regions.symbolic_size import product
from lit_ort.regions.value_expressions import Expression, NotRegional, permuted, reads_of

if TYPE_CHECKING:
    from lit_ort.regions.graph_values import Terms

aten = torch.ops.aten

Results = tuple[Expression | None, ...]


def mean_over(terms: Terms, x: Expression, axes: Sequence[int]) -> Expression:
    return terms.apply("div", terms.reduce("sum", x, axes), product(x.shape[axis] for axis in axes))


def layer_norm(terms: Terms, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Results:
    x = terms.given(x)
    axes = range(len(x.shape) - len(shape), len(x.shape))
    mean = mean_over(terms, x, axes)
    centred = terms.apply("sub", x, mean)
    variance = mean_over(terms, terms.apply("mul", centred, centred), axes)
    scale = terms.apply("rsqrt", terms.apply("add", variance, eps))
    y = terms.apply("mul", centred, scale)
    y = y if weight is None else terms.apply("mul", y, terms.given(weight))
    return y if bias is None else terms.apply("add", y, terms.given(bias)), mean, scale


def layer_norm_backward(
    terms: Terms,
    grad: Any,
    x: Any,
    shape: Sequence[int],
    mean: Any,
    scale: Any,
    weight: Any,
    bias: Any,
    wanted: Sequence[bool],
) -> Results:
    g, x, scale = terms.given(grad), terms.given(x), terms.given(scale)
    rank = len(x.shape)
    inner, outer = range(rank - len(shape), rank), range(rank - len(shape))
    y = terms.apply("mul", terms.apply("sub", x, terms.given(mean)), scale)
    weighted = g if weight is None else terms.apply("mul", g, terms.given(weight))
    first = mean_over(terms, weighted, inner)
    second = mean_over(terms, terms.apply("mul", weighted, y), inner)
    rest = terms.apply("sub", terms.apply("sub", weighted, first), terms.apply("mul", y, second))
    return (
        terms.apply("mul", rest, scale) if wanted[0] else None,
        terms.squeezed(terms.reduce("sum", terms.apply("mul", g, y), outer), outer) if wanted[1] else None,
        terms.squeezed(terms.reduce("sum", g, outer), outer) if wanted[2] else None,
    )


def _rows_of(x: Expression) -> Expression:
    """What batch normalization reads, with the dimension of the channels, which are adjacent in memory, as the last."""
    rank = len(x.shape)
    if rank > 2 and not any(read.value is not None and read.view.strides[1] == 1 for read in reads_of(x)):
        raise NotRegional("channels of images or sequences that are not last, which torch's operator normalizes faster")
    return permuted(x, _order_of(rank))


def _order_of(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _as_given(rows: Expression) -> Expression:
    """A result with the dimensions of what batch normalization reads."""
    return permuted(rows, inverse_order(_order_of(len(rows.shape))))


def _scaled_and_moved(terms: Terms, x: Expression, weight: Any, bias: Any) -> Expression:
    x = x if weight is None else terms.apply("mul", x, terms.given(weight))
    return x if bias is None else terms.apply("add", x, terms.given(bias))


def batch_norm(
    terms: Terms,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Results:
    """(the result, the mean, 1 / the standard deviation, the new running mean, the new running variance).

    The running variance is that of a sample: the batch's times n / (n - 1).
    """
    if not training:
        raise NotRegional("statistics that stay, in this form of the operator")
    results, variance = _batch_norm(terms, x, weight, bias, eps)
    count = product(_rows_of(terms.given(x)).shape[:-1])
    sample = terms.apply("div", terms.apply("mul", variance, count), count - 1)
    new = (
        terms.apply(
            "add", terms.apply("mul", value, float(momentum)), terms.apply("mul", terms.given(old), 1 - momentum)
        )
        for value, old in ((results[1], running_mean), (sample, running_var))
    )
    return (*results, *new)


def batch_norm_without_statistics(
    terms: Terms, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Results:
    return _batch_norm(terms, x, weight, bias, eps)[0]


def _batch_norm(
    terms: Terms, x: Any, weight: Any, bias: Any, eps: float
) -> tuple[tuple[Expression, Expression, Expression], Expression]:
    """((the result, the mean, 1 / the standard deviation), the variance)."""
    x = _rows_of(terms.given(x))
    axes = range(len(x.shape) - 1)
    mean = mean_over(terms, x, axes)
    # Several passes read x, none writes what is between.
    centred = terms.computed_again("sub", x, mean)
    variance = mean_over(terms, terms.computed_again("mul", centred, centred), axes)
    scale = terms.apply("rsqrt", terms.apply("add", variance, eps))
    y = _scaled_and_moved(terms, terms.computed_again("mul", centred, scale), weight, bias)
    mean, scale, variance = (terms.squeezed(part, axes) for part in (mean, scale, variance))
    return (_as_given(y), mean, scale), variance


def batch_norm_of_statistics(
    terms: Terms, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Results:
    x = _rows_of(terms.given(x))
    scale = terms.apply("rsqrt", terms.apply("add", terms.given(running_var), eps))
    y = terms.apply("mul", terms.apply("sub", x, terms.given(running_mean)), scale)
    # There are no statistics of the batch.
    return _as_given(_scaled_and_moved(terms, y, weight, bias)), None, None


def batch_norm_backward(
    terms: Terms,
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    scale: Any,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
) -> Results:
    x = _rows_of(terms.given(x))
    if not training:
        raise NotRegional("gradients with statistics that stay")
    g, axes = permuted(terms.given(grad), _order_of(len(x.shape))), range(len(x.shape) - 1)
    y = terms.computed_again("mul", terms.computed_again("sub", x, terms.given(mean)), terms.given(scale))
    of_bias, of_weight = (terms.reduce("sum", part, axes) for part in (g, terms.computed_again("mul", g, y)))
    count = product(x.shape[:-1])
    rest = terms.apply("sub", g, terms.apply("div", of_bias, count))
    rest = terms.apply("sub", rest, terms.apply("mul", y, terms.apply("div", of_weight, count)))
    factor = terms.given(scale) if weight is None else terms.apply("mul", terms.given(scale), terms.given(weight))
    of_x = _as_given(terms.apply("mul", rest, factor))
    results = of_x, terms.squeezed(of_weight, axes), terms.squeezed(of_bias, axes)
    return tuple(result if is_wanted else None for result, is_wanted in zip(results, wanted, strict=True))


NORMALIZATIONS: dict[Any, Callable[..., Results]] = {
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_statistics,
    aten._native_batch_norm_legit_no_training.default: batch_norm_of_statistics,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
