"""Expressions over views of values: what an FX graph computes before regions are formed of it.

A value is something that is computed once: an input, the result of a library call, a pointwise expression, a reduction.
Views of an expression are views of what it reads, so that they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lit_ort._compat.torch_sizes import channels_last
from lit_ort.regions.pointwise_table import OPERATORS
from lit_ort.regions.strided_views import StridedView
from lit_ort.regions.symbolic_size import Number, Size

ViewOf = Callable[[StridedView], StridedView]


class NotRegional(Exception):
    """An operator, or a call of it, that regions don't have."""


@dataclass(frozen=True)
class Read:
    """Elements of a value; of no value, the numbers offset + sum of index · stride themselves.

    Where a mask is False nothing is read, and the element is 0.
    """

    value: Value | None
    view: StridedView
    dtype: str
    mask: Expression | None = None

    @property
    def shape(self) -> tuple[Number, ...]:
        return self.view.shape


@dataclass(frozen=True)
class Take:
    """Elements of a value at a view plus index · stride, as an embedding's."""

    value: Value
    view: StridedView
    index: Expression
    stride: Number
    size: Number
    dtype: str

    @property
    def shape(self) -> tuple[Number, ...]:
        return self.view.shape


@dataclass(frozen=True)
class Constant:
    """A number; as an argument of a run it is no part of the code, so that regions with other numbers share it.

    A number that only the sizes of a run tell is such an argument.
    """

    number: float | Number
    shape: tuple[Number, ...]
    dtype: str
    is_argument: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.number, Size):
            object.__setattr__(self, "is_argument", True)


@dataclass(frozen=True)
class Compute:
    """An operator of the table, or a cast."""

    operator: str
    args: tuple[Expression, ...]
    shape: tuple[Number, ...]
    dtype: str


Expression = Read | Take | Constant | Compute


@dataclass(eq=False)
class Value:
    """Something that is computed once.

    Args:
        name: of its FX node.
        shape: its sizes.
        dtype: in memory.
        kind: "given" for inputs and results of library calls, "pointwise", the kind of a reduction, or "scatter".
        expression: what is computed, reduced, or added row by row to rows of the value.
        axes: the axes of the expression that a reduction is over.
        is_of_backward: whether it is computed in the backward, and not to be kept since the forward.
        rows: of a scatter, the row that each row of the expression is added to.
        start: of a scatter, what it is added to; None for 0.
    """

    name: str
    shape: tuple[Number, ...]
    dtype: str
    kind: str = "given"
    expression: Expression | None = None
    axes: tuple[int, ...] = ()
    is_of_backward: bool = False
    rows: Expression | None = None
    start: Value | None = None
    view: StridedView = field(init=False)
    number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.view = StridedView.of(self.shape)

    def read(self) -> Read:
        return Read(self, self.view, self.dtype)

    def needs(self) -> list[Value]:
        """The values that are read, each once."""
        return self._needs

    @cached_property
    def _needs(self) -> list[Value]:
        parts = [part for part in (self.expression, self.rows) if part is not None]
        starts = [] if self.start is None else [self.start]
        return list(dict.fromkeys([*(value for part in parts for value in values_of(part)), *starts]))


def converted(expression: Expression, dtype: str) -> Expression:
    """An expression in a dtype."""
    return expression if expression.dtype == dtype else Compute("cast", (expression,), expression.shape, dtype)


def compared(relation: str, x: Expression, number: float | Number) -> Compute:
    """Whether each element has a relation to a number, such as "lt"."""
    return Compute(relation, (x, Constant(number, x.shape, x.dtype)), x.shape, "bool")


def required(x: Expression, low: tuple[str, float | Number], high: tuple[str, float | Number]) -> Compute:
    """x, with an error of the run where an element doesn't have both relations to numbers."""
    tests = tuple(compared(relation, x, number) for relation, number in (low, high))
    return Compute("require", (Compute("logical_and", tests, x.shape, "bool"), x), x.shape, x.dtype)


def viewed(expression: Expression, view: ViewOf) -> Expression:
    """A view of an expression; the view must be possible for all that it reads."""
    if isinstance(expression, Read):
        mask = None if expression.mask is None else viewed(expression.mask, view)
        return Read(expression.value, view(expression.view), expression.dtype, mask)
    if isinstance(expression, Constant):
        shape = view(StridedView(expression.shape, (0,) * len(expression.shape))).shape
        return replace(expression, shape=shape)
    if isinstance(expression, Take):
        index = viewed(expression.index, view)
        return Take(
            expression.value, view(expression.view), index, expression.stride, expression.size, expression.dtype
        )
    args = tuple(viewed(arg, view) for arg in expression.args)
    return Compute(expression.operator, args, args[0].shape, expression.dtype)


def broadcast_shape(shapes: Iterable[tuple[Number, ...]]) -> tuple[Number, ...]:
    """The common shape of shapes that broadcast."""
    known = list(shapes)
    rank = max(map(len, known))
    padded = [(1,) * (rank - len(shape)) + shape for shape in known]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def reads_of(expression: Expression) -> Iterator[Read | Take]:
    """All that an expression reads, numbers of elements included."""
    if isinstance(expression, Compute):
        for arg in expression.args:
            yield from reads_of(arg)
    elif isinstance(expression, Take):
        yield expression
        yield from reads_of(expression.index)
    elif isinstance(expression, Read):
        yield expression
        if expression.mask is not None:
            yield from reads_of(expression.mask)


def values_of(expression: Expression) -> Iterator[Value]:
    for read in reads_of(expression):
        if read.value is not None:
            yield read.value


def is_reading(expression: Expression) -> bool:
    """Whether an expression is of anything but constants."""
    return next(reads_of(expression), None) is not None


def cost_of_expression(expression: Expression) -> int:
    """About how many instructions of a vector an element takes; what is of constants alone isn't computed for each."""
    if isinstance(expression, Compute):
        if not is_reading(expression):
            return 0
        own = 1 if expression.operator == "cast" else OPERATORS[expression.operator].cost
        return own + sum(cost_of_expression(arg) for arg in expression.args)
    if isinstance(expression, Read) and expression.mask is not None:
        return 1 + cost_of_expression(expression.mask)
    return 4 if isinstance(expression, Take) else 0


def shifted(expression: Expression, axis: int, start: Number, size: Number, inside: Expression) -> Expression | None:
    """An expression along an axis of another size, from index `start` on, where `inside`; None for what can't be.

    Elsewhere its elements are not specified, and nothing is read.
    """
    shape = (*expression.shape[:axis], size, *expression.shape[axis + 1 :])
    if isinstance(expression, Constant):
        return replace(expression, shape=shape)
    if isinstance(expression, Read) and expression.mask is None:
        view = expression.view
        moved = StridedView(shape, view.strides, view.offset - start * view.strides[axis])
        return Read(expression.value, moved, expression.dtype, None if expression.value is None else inside)
    if isinstance(expression, Compute):
        args = [shifted(arg, axis, start, size, inside) for arg in expression.args]
        known = tuple(arg for arg in args if arg is not None)
        return Compute(expression.operator, known, shape, expression.dtype) if len(known) == len(args) else None
    return None


def is_all(expression: Any) -> bool:
    """Whether an expression is all elements of a value in their order."""
    if not isinstance(expression, Read) or expression.value is None or expression.mask is not None:
        return False
    own, view = expression.value.view, expression.view
    return view == own or (view.is_whole and own.is_whole and view.size == own.size)


def permuted(expression: Expression, order: Sequence[int]) -> Expression:
    """An expression with its dimensions in another order."""
    return viewed(expression, lambda view: view.permute(order))


def order_of_elements(expression: Any) -> list[int] | None:
    """The order of dimensions in which an expression is all elements of a value in theirs: own, or with channels last.

    None if it is in neither.
    """
    if is_all(expression):
        return list(range(len(expression.shape)))
    if isinstance(expression, Read) and len(expression.shape) in (4, 5):
        order = channels_last(len(expression.shape))
        return order if is_all(permuted(expression, order)) else None
    return None
