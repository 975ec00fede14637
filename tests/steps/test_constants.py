"""Constants with equal values and other bits or types: results have eager's bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compare import backend

NUMBERS = (0.0, -0.0, 0, False, 1, 1.0, True, -1, 2, 2.0, float("nan"), -float("nan"), float("inf"))
OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sum": lambda x, c: x + c,
    "reversed sum": lambda x, c: c + x,
    "difference": lambda x, c: x - c,
    "reversed difference": lambda x, c: c - x,
    "product": lambda x, c: x * c,
    "quotient": lambda x, c: x / c,
    "reversed quotient": lambda x, c: c / x,
    "sum with a tensor": lambda x, c: x + torch.full((4,), c),
    "product with a tensor": lambda x, c: x * torch.full((4,), c),
    "scaled sum": lambda x, c: torch.add(x, x, alpha=c),
    "constant": lambda x, c: torch.tensor(c),
    "full": lambda x, c: torch.full((3,), c),
    "like": lambda x, c: torch.full_like(x, c),
    "power": lambda x, c: x**c,
    "selected": lambda x, c: torch.where(x > 0, c, -1),
    "masked": lambda x, c: x.masked_fill(x > 0, c),
    "smallest": lambda x, c: x.clamp(min=c),
    "filled": lambda x, c: x.clone().fill_(c),
    "written": lambda x, c: x.index_fill(0, torch.tensor([1]), c),
    "compared": lambda x, c: x == c,
}
# Those of complex numbers too.
ARITHMETIC = [*OPERATIONS][:10]


def bits(value: Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    """A value's type, shape and bytes. The sign of a computed nan depends on the processor's instruction."""
    if value.is_floating_point():
        value = torch.where(value.isnan(), torch.nan, value)
    return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same_bits(operations: Sequence[str], numbers: Sequence[Any], x: Tensor) -> None:
    """All operations and numbers in one graph."""
    pairs = [(name, c) for name in operations for c in numbers if _runs(OPERATIONS[name], x, c)]

    def step(x: Tensor) -> list[Tensor]:
        return [OPERATIONS[name](x, c) for name, c in pairs]

    for pair, actual, expected in zip(pairs, torch.compile(step, backend=backend())(x), step(x), strict=True):
        assert bits(actual) == bits(expected), pair


def _runs(operation: Callable[[Tensor, Any], Tensor], x: Tensor, c: Any) -> bool:
    try:
        operation(x, c)
    except RuntimeError:
        return False
    return True


FLOATS = torch.tensor([1.5, -2.0, -0.0, 0.0])
COMPLEX = torch.tensor([1 + 1j, complex(-0.0, 0.0), complex(0.0, -0.0), complex(-0.0, -0.0), complex(0.0, torch.inf)])


def test_signs_of_zeros() -> None:
    assert_same_bits(ARITHMETIC, (0.0, -0.0, 1.0), FLOATS)


@pytest.mark.slow
def test_floats() -> None:
    assert_same_bits([*OPERATIONS], NUMBERS, FLOATS)


@pytest.mark.slow
def test_integers() -> None:
    assert_same_bits([*OPERATIONS], NUMBERS, FLOATS.long())


@pytest.mark.slow
def test_booleans() -> None:
    names = [name for name in ARITHMETIC if "difference" not in name]
    assert_same_bits(names, NUMBERS, FLOATS > 0)


@pytest.mark.slow
def test_complex_values() -> None:
    numbers = (0j, -0j, complex(0.0, -0.0), complex(-0.0, -0.0), 1 + 0j, complex(1.0, -0.0), 1j)
    assert_same_bits(ARITHMETIC, (*NUMBERS, *numbers), COMPLEX)


def test_numbers_in_nodes_of_onnx_runtime() -> None:
    """A run of operators that is long enough for ONNX Runtime, whose optimizer has rules for neutral constants."""

    def step(x: Tensor) -> tuple[Tensor, ...]:
        results = []
        for c, d in itertools.product((0.0, -0.0, 3.0), repeat=2):
            a = x * c
            results += [a + d, a - d, a * d / 2.0, -(a + 0.0)]
        return tuple(results)

    engine = backend(disable_passes=("regions",))
    x = FLOATS
    actual = torch.compile(step, backend=engine)(x)
    assert "Mul" in engine.compile_log.graphs[0].operators_after
    assert list(map(bits, actual)) == list(map(bits, step(x)))


def test_a_number_that_changes() -> None:
    compiled = torch.compile(lambda x, c: torch.full_like(x, c), backend=backend(), dynamic=True)
    x = FLOATS
    for c in (0.5, 0.0, -0.0, 0.25, float("nan"), 0.0):
        assert bits(compiled(x, c)) == bits(torch.full_like(x, c)), c


@pytest.mark.parametrize("recompute", [None, 0.5])
def test_zeros_of_both_signs_in_a_gradient(recompute: float | None) -> None:
    def step(x: Tensor) -> Tensor:
        return (torch.copysign(x.exp(), x * 0.0) + torch.copysign(x.exp() * 3, x * -0.0)).sum()

    x = torch.ones(4, requires_grad=True)
    actual = torch.autograd.grad(torch.compile(step, backend=backend(recompute=recompute))(x), x)
    torch.testing.assert_close(actual, torch.autograd.grad(step(x), x))
