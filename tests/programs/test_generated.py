"""Generated steps beside eager: none wrong, none raising where eager doesn't."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.programs.check import RIGHT, check
from tests.programs.program import Program, program
from tests.steps.case import assert_alike, values_of

SEEDS = range(8)
EXAMPLES = 12


@pytest.mark.slow
@pytest.mark.parametrize("first", SEEDS)
def test_as_eager(first: int) -> None:
    """`python -m tests.programs.check --count 1000` runs more of them, without shortening what fails."""

    @seed(first)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.randoms(use_true_random=False))
    def compare(drawn: random.Random) -> None:
        check(program(drawn))

    compare()


def test_tells_another_value_from_eager() -> None:
    source = "def step(m, x, y, index):\n    return ((m.first(x) * {factor}).sum(),)\n"
    right, wrong = (Program(source.format(factor=factor), False, (4,)).case() for factor in (2.0, 2.001))
    with pytest.raises(AssertionError, match=re.escape("result 0 of call 0")):
        assert_alike(values_of(wrong.module, wrong.module, wrong), values_of(right.module, right.module, right))
    assert check(Program(source.format(factor=2.0), False, (4, 6))) == RIGHT


def test_a_program_is_drawn_anew_from_its_seed() -> None:
    first, again, other = (program(random.Random(number)) for number in (7, 7, 8))
    assert first == again != other
