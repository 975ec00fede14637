"""Losses of classes and of numbers, with their gradients, as values of regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lit_ort.regions.element_types import computed_in
from lit_ort.regions.index_expressions import taken
from lit_ort.regions.node_expressions import along
from lit_ort.regions.symbolic_size import Number, product
from lit_ort.regions.value_expressions import (
    Compute,
    Constant,
    Expression,
    NotRegional,
    compared,
    converted,
    required,
    viewed,
)

if TYPE_CHECKING:
    from lit_ort.regions.graph_values import Reader, Terms

aten = torch.ops.aten


def _labels(reader: Reader, target: Any, ignore_index: Number) -> tuple[Expression, Expression]:
    """(the class of each place, or 0 if it is ignored; whether it isn't)."""
    labels = reader.of(target)
    shape = labels.shape
    valid = compared("ne", labels, ignore_index)
    return Compute("where", (valid, labels, Constant(0, shape, labels.dtype)), shape, labels.dtype), valid


def nll_loss(
    terms: Terms, x: Any, target: Any, weight: Any, reduction: int, ignore_index: Number
) -> tuple[Expression, ...]:
    """(the mean, the sum or each of -x at the label of a place, times the label's weight; the sum of weights).

    Classes are along axis 1, the other axes are places.
    """
    reader, node = terms.reader, terms.node
    dtype = computed_in(terms.given(x).dtype)
    if len(terms.given(x).shape) < 2:
        raise NotRegional("a loss of one place")
    index, valid = _labels(reader, target, ignore_index)
    nothing = Constant(0.0, index.shape, dtype)
    one: Expression = Constant(1.0, index.shape, dtype)
    scale = one if weight is None else converted(taken(reader, node, weight, index, 0), dtype)
    picked = terms.apply("mul", converted(taken(reader, node, x, index, 1), dtype), scale)
    losses = Compute("where", (valid, terms.apply("neg", picked), nothing), index.shape, dtype)
    if reduction == 0:
        return losses, Constant(0.0, (), dtype)
    weights = Compute("where", (valid, scale, nothing), index.shape, dtype)
    axes = range(len(index.shape))
    loss, total = (terms.squeezed(terms.reduce("sum", part, axes), axes) for part in (losses, weights))
    return (terms.apply("div", loss, total) if reduction == 1 else loss), total


def nll_loss_backward(
    terms: Terms, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: Number, total: Any
) -> tuple[Expression, ...]:
    reader, shape = terms.reader, terms.given(x).shape
    if len(shape) < 2:
        raise NotRegional("a loss of one place")
    index, valid = _labels(reader, target, ignore_index)
    share = terms.apply("div", terms.given(grad), terms.given(total)) if reduction == 1 else terms.given(grad)
    if weight is not None:
        share = terms.apply("mul", share, converted(taken(reader, terms.node, weight, index, 0), share.dtype))
    places, is_valid, share = (
        reader.broadcast(viewed(reader.broadcast(part, index.shape), lambda view: view.insert(1)), shape)
        for part in (index, valid, share)
    )
    own = Compute("eq", (along(shape, 1), reader.cast(places, "int64")), shape, "bool")
    hit = Compute("logical_and", (own, is_valid), shape, "bool")
    value = terms.apply("neg", share)
    return (Compute("where", (hit, value, Constant(0.0, shape, value.dtype)), shape, value.dtype),)


def mean_of(terms: Terms, losses: Expression, reduction: int) -> Expression:
    """The mean, the sum, or each of the losses."""
    if reduction == 0:
        return losses
    axes = range(len(losses.shape))
    total = terms.squeezed(terms.reduce("sum", losses, axes), axes)
    return terms.apply("div", total, product(losses.shape)) if reduction == 1 else total


def mse_loss(terms: Terms, x: Any, y: Any, reduction: int = 1) -> tuple[Expression, ...]:
    difference = terms.apply("sub", terms.given(x), terms.given(y))
    return (mean_of(terms, terms.apply("mul", difference, difference), reduction),)


def mse_loss_backward(terms: Terms, grad: Any, x: Any, y: Any, reduction: int) -> tuple[Expression, ...]:
    difference = terms.apply("sub", terms.given(x), terms.given(y))
    share = terms.apply("mul", terms.given(grad), 2.0)
    share = terms.apply("div", share, product(difference.shape)) if reduction == 1 else share
    return (terms.apply("mul", difference, share),)


def _share(terms: Terms, grad: Any, x: Any, reduction: int) -> Expression:
    """The gradient of each loss."""
    share = terms.given(grad)
    return terms.apply("div", share, product(terms.given(x).shape)) if reduction == 1 else share


def _fixed(number: float | Number) -> float:
    if isinstance(number, int | float):
        return float(number)
    raise NotRegional("a number that sizes tell")


def _square_and_line(terms: Terms, x: Any, y: Any, limit: float) -> tuple[Expression, Expression]:
    """(m², z - m) of the distance z and m = min(z, limit)."""
    size = terms.apply("abs", terms.apply("sub", terms.given(x), terms.given(y)))
    inner = terms.apply("minimum", size, _fixed(limit))
    return terms.apply("mul", inner, inner), terms.apply("sub", size, inner)


def huber_loss(terms: Terms, x: Any, y: Any, reduction: int = 1, delta: float = 1.0) -> tuple[Expression, ...]:
    """Half of the squared distance up to delta, and a line from there on."""
    square, line = _square_and_line(terms, x, y, delta)
    losses = terms.apply("add", terms.apply("mul", square, 0.5), terms.apply("mul", line, _fixed(delta)))
    return (mean_of(terms, losses, reduction),)


def huber_loss_backward(
    terms: Terms, grad: Any, x: Any, y: Any, reduction: int, delta: float
) -> tuple[Expression, ...]:
    difference = terms.apply("sub", terms.given(x), terms.given(y))
    slope = terms.apply("clamp", difference, -_fixed(delta), _fixed(delta))
    return (terms.apply("mul", slope, _share(terms, grad, x, reduction)),)


def smooth_l1_loss(terms: Terms, x: Any, y: Any, reduction: int = 1, beta: float = 1.0) -> tuple[Expression, ...]:
    """As `huber_loss`, divided by beta."""
    if beta == 0:
        raise NotRegional("a smooth loss without a smooth part")
    square, line = _square_and_line(terms, x, y, beta)
    return (mean_of(terms, terms.apply("add", terms.apply("mul", square, 0.5 / _fixed(beta)), line), reduction),)


def smooth_l1_loss_backward(
    terms: Terms, grad: Any, x: Any, y: Any, reduction: int, beta: float
) -> tuple[Expression, ...]:
    if beta == 0:
        raise NotRegional("a smooth loss without a smooth part")
    difference = terms.apply("sub", terms.given(x), terms.given(y))
    slope = terms.apply("clamp", terms.apply("div", difference, _fixed(beta)), -1.0, 1.0)
    return (terms.apply("mul", slope, _share(terms, grad, x, reduction)),)


def binary_cross_entropy_with_logits(
    terms: Terms, x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> tuple[Expression, ...]:
    """(1 - target) x - log(sigmoid(x)), for any x without overflow; a target of 1 counts `pos_weight` times."""
    logits, positive = terms.given(x), terms.given(target)
    rest = terms.apply("log1p", terms.apply("exp", terms.apply("neg", terms.apply("abs", logits))))
    log_sigmoid = terms.apply("sub", terms.apply("minimum", logits, 0.0), rest)
    if pos_weight is not None:
        more = terms.apply("mul", terms.apply("sub", terms.given(pos_weight), 1.0), positive)
        log_sigmoid = terms.apply("mul", terms.apply("add", more, 1.0), log_sigmoid)
    losses = terms.apply("sub", terms.apply("mul", terms.apply("rsub", positive, 1.0), logits), log_sigmoid)
    return (mean_of(terms, _weighted(terms, losses, weight), reduction),)


def _weighted(terms: Terms, losses: Expression, weight: Any) -> Expression:
    return losses if weight is None else terms.apply("mul", losses, terms.given(weight))


def binary_cross_entropy(
    terms: Terms, x: Any, target: Any, weight: Any = None, reduction: int = 1
) -> tuple[Expression, ...]:
    """(target - 1) log(1 - x) - target log(x), with logarithms of at least -100; an x outside of 0 to 1 is an error."""
    positive, share = terms.given(target), required(terms.given(x), ("ge", 0.0), ("le", 1.0))
    of_one = terms.apply("maximum", terms.apply("log", share), -100.0)
    of_zero = terms.apply("maximum", terms.apply("log1p", terms.apply("neg", share)), -100.0)
    negative = terms.apply("mul", terms.apply("sub", positive, 1.0), of_zero)
    losses = terms.apply("sub", negative, terms.apply("mul", positive, of_one))
    return (mean_of(terms, _weighted(terms, losses, weight), reduction),)


def binary_cross_entropy_backward(
    terms: Terms, grad: Any, x: Any, target: Any, weight: Any = None, reduction: int = 1
) -> tuple[Expression, ...]:
    given = terms.given(x)
    slope = terms.apply("maximum", terms.apply("mul", terms.apply("rsub", given, 1.0), given), 1e-12)
    difference = terms.apply("div", terms.apply("sub", given, terms.given(target)), slope)
    gradient = terms.apply("mul", difference, _share(terms, grad, x, reduction))
    return (_weighted(terms, gradient, weight),)


def _of_margin(terms: Terms, x: Any, target: Any) -> tuple[Expression, Expression]:
    """(the target; exp(-target · x))."""
    sign = terms.given(target)
    return sign, terms.apply("exp", terms.apply("mul", terms.apply("neg", sign), terms.given(x)))


def soft_margin_loss(terms: Terms, x: Any, target: Any, reduction: int = 1) -> tuple[Expression, ...]:
    """log(1 + exp(-target · x))."""
    return (mean_of(terms, terms.apply("log1p", _of_margin(terms, x, target)[1]), reduction),)


def soft_margin_loss_backward(terms: Terms, grad: Any, x: Any, target: Any, reduction: int) -> tuple[Expression, ...]:
    sign, z = _of_margin(terms, x, target)
    slope = terms.apply("div", terms.apply("mul", terms.apply("neg", sign), z), terms.apply("add", z, 1.0))
    return (terms.apply("mul", slope, _share(terms, grad, x, reduction)),)


LOSSES: dict[Any, Callable[..., tuple[Expression | None, ...]]] = {
    aten.nll_loss_forward.default: nll_loss,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_forward.default: nll_loss,
    aten.nll_loss2d_backward.default: nll_loss_backward,
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
    aten.huber_loss.default: huber_loss,
    aten.huber_loss_backward.default: huber_loss_backward,
    aten.smooth_l1_loss.default: smooth_l1_loss,
    aten.smooth_l1_loss_backward.default: smooth_l1_loss_backward,
    aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
    aten.binary_cross_entropy.default: binary_cross_entropy,
    aten.binary_cross_entropy_backward.default: binary_cross_entropy_backward,
    aten.soft_margin_loss.default: soft_margin_loss,
    aten.soft_margin_loss_backward.default: soft_margin_loss_backward,
}
