"""Generated steps have the same values as in eager and raise no errors of their own."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.programs.check import CORRECT, check
from tests.programs.program import Program, draw_program
from tests.steps.case import assert_alike, values_of

SEEDS = [0, *(pytest.param(first, marks=pytest.mark.sweep) for first in range(1, 16))]
EXAMPLES = 12


@pytest.mark.slow
@pytest.mark.parametrize("first", SEEDS)
def test_same_as_eager(first: int) -> None:
    """`python -m tests.programs.check --count 1000` runs more programs, but doesn't shorten failing ones."""

    @seed(first)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.randoms(use_true_random=False))
    def compare(draw: random.Random) -> None:
        check(draw_program(draw))

    compare()


def test_a_value_that_differs_from_eager_is_detected() -> None:
    source = "def step(m, x, y, index):\n    return ((m.first(x) * {factor}).sum(),)\n"
    correct, wrong = (Program(source.format(factor=factor), False, (4,)).case() for factor in (2.0, 2.001))
    with pytest.raises(AssertionError, match=re.escape("result 0 of call 0")):
        assert_alike(values_of(wrong.module, wrong.module, wrong), values_of(correct.module, correct.module, correct))
    assert check(Program(source.format(factor=2.0), False, (4, 6))) == CORRECT


def test_a_program_depends_only_on_its_seed() -> None:
    first, again, other = (draw_program(random.Random(number)) for number in (7, 7, 8))
    assert first == again != other
