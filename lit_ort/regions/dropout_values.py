"""lit_ort's dropout as values of regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lit_ort.regions.counter_random import DROPOUT_OFF
from lit_ort.regions.element_types import computed_in
from lit_ort.regions.node_expressions import along
from lit_ort.regions.strided_views import StridedView
from lit_ort.regions.symbolic_size import product
from lit_ort.regions.value_expressions import (
    Compute,
    Constant,
    Expression,
    NotRegional,
    Read,
    compared,
    converted,
)

if TYPE_CHECKING:
    from lit_ort.regions.graph_values import Terms


def _keep_scale(terms: Terms, seed: Any, p: float) -> tuple[Expression, Expression]:
    """(whether dropout is off, the factor of what is kept)."""
    off = compared("eq", terms.reader.of(seed), DROPOUT_OFF)
    scale = Constant(1 / (1 - p) if p < 1 else 0.0, (), "float32", is_argument=True)
    return off, Compute("where", (off, Constant(1.0, (), "float32"), scale), (), "float32")


def _dropout(terms: Terms, x: Any, seed: Any, p: float, stream: int) -> tuple[Expression, ...]:
    """lit_ort's dropout: element (row, column) of the last axis has a random number of the seed and the stream."""
    reader, given = terms.reader, terms.given(x)
    shape = given.shape
    if not shape:
        raise NotRegional("dropout of one element")
    strides = tuple(product(shape[axis + 1 : -1]) for axis in range(len(shape) - 1))
    row = Read(None, StridedView(shape, (*strides, 0)), "int64")
    spread = reader.broadcast(reader.of(seed), shape)
    number = Constant(stream, shape, "int64", is_argument=True)
    random = Compute("random", (spread, number, row, along(shape, len(shape) - 1)), shape, "float32")
    off, scale = _keep_scale(terms, seed, p)
    drawn = Compute("ge", (random, Constant(p, shape, "float32", is_argument=True)), shape, "bool")
    keep = Compute("logical_or", (drawn, reader.broadcast(off, shape)), shape, "bool")
    mask = reader.value(terms.node.name, keep).read()
    return _masked(terms, given, mask, scale), mask


def _dropout_backward(terms: Terms, grad: Any, mask: Any, seed: Any, p: float) -> tuple[Expression, ...]:
    return (_masked(terms, terms.given(grad), terms.reader.of(mask), _keep_scale(terms, seed, p)[1]),)


def _masked(terms: Terms, x: Expression, mask: Expression, scale: Expression) -> Expression:
    # As a factor: what is not finite stays so.
    dtype = computed_in(x.dtype)
    scale = terms.reader.broadcast(converted(scale, dtype), x.shape)
    return terms.apply("mul", x, Compute("where", (mask, scale, Constant(0, x.shape, dtype)), x.shape, dtype))


# By name, since this room doesn't define them.
DROPOUT: dict[str, Callable[..., tuple[Expression | None, ...]]] = {
    "lit_ort.dropout.default": _dropout,
    "lit_ort.dropout_backward.default": _dropout_backward,
}
