"""Polynomials of sizes: their arithmetic is that of their values, and what they divide they divide for all values."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lit_ort.regions.symbolic_size import Number, Size, divides, number_of, product, quotient, value_of

ENVIRONMENT = ShapeEnv()


def _symbols() -> list[torch.SymInt]:
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    shape, _, _ = ENVIRONMENT.create_symbolic_sizes_strides_storage_offset(
        torch.empty(7, 5), ConstantSource("x"), symbolic_context=context
    )
    return list(shape)  # type: ignore[arg-type]


FIRST, SECOND = _symbols()
ATOMS: list[Any] = [FIRST, SECOND, FIRST // 2, 1, 2, 3, -1]


def at(number: Number, first: int, second: int) -> int:
    """The value for other sizes than those of the trace."""
    if not isinstance(number, Size):
        return number
    symbols = {FIRST.node.expr: first, SECOND.node.expr: second}
    return int(number.expression.subs(symbols))


numbers = st.recursive(
    st.sampled_from(ATOMS).map(number_of),
    lambda parts: st.tuples(st.sampled_from(["add", "sub", "mul"]), parts, parts).map(
        lambda drawn: {"add": drawn[1] + drawn[2], "sub": drawn[1] - drawn[2], "mul": drawn[1] * drawn[2]}[drawn[0]]
    ),
    max_leaves=6,
)


@given(numbers, numbers, st.integers(2, 40), st.integers(2, 40))
def test_arithmetic_is_that_of_the_values(left: Number, right: Number, first: int, second: int) -> None:
    one, other = at(left, first, second), at(right, first, second)
    assert at(left + right, first, second) == one + other
    assert at(left - right, first, second) == one - other
    assert at(left * right, first, second) == at(product([left, right]), first, second) == one * other
    assert value_of(left) == at(left, 7, 5)


@given(numbers, numbers)
def test_equal_polynomials_are_equal(left: Number, right: Number) -> None:
    assert left + right == right + left
    assert hash(left * right) == hash(right * left)
    assert left - left == 0
    assert (left == right) == (sympy.expand(_expression(left) - _expression(right)) == 0)


def _expression(number: Number) -> Any:
    return number.expression if isinstance(number, Size) else sympy.Integer(number)


@given(numbers, numbers, st.integers(2, 40), st.integers(2, 40))
def test_a_product_has_its_factors_as_quotients(left: Number, right: Number, first: int, second: int) -> None:
    if value_of(right) != 0:
        assert divides(right, left * right)
        assert quotient(left * right, right) == left
    if divides(right, left):
        whole = quotient(left, right)
        assert at(whole, first, second) * at(right, first, second) == at(left, first, second)


@pytest.mark.parametrize(
    ("divisor", "number"),
    [(2, FIRST), (FIRST, 7), (FIRST, SECOND), (FIRST, FIRST + 1), (FIRST // 2, FIRST), (4, FIRST * 2), (0, 5)],
)
def test_what_divides_only_in_the_trace_does_not(divisor: Any, number: Any) -> None:
    assert not divides(number_of(divisor), number_of(number))


def test_sizes_of_traces_and_back() -> None:
    size = number_of(FIRST * SECOND + 3 * FIRST)
    assert isinstance(size, Size)
    assert size.hint == 7 * 5 + 3 * 7
    assert size.traced.node.expr == (FIRST * SECOND + 3 * FIRST).node.expr
    assert number_of(FIRST - FIRST) == 0
