"""Steps and programs of few elements take the ways of many: sums in two stages, threads, sessions, native
sessions, planned memory."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping

import pytest

from tests.compare import mostly
from tests.programs.check import check
from tests.programs.program import draw_program
from tests.steps import test_steps
from tests.steps.case import CASES

PROGRAMS = 8
# What is decided by the number of elements or operators.
LOW: Mapping[str, Mapping[str, float]] = {
    "lit_ort.regions.graph_values": {"_LONG_ROW": 1},
    "lit_ort.regions.form_regions": {"_SMALL": 0},
    "lit_ort.regions.region_cost": {"_SMALL": 0},
    "lit_ort.lower.native_operators": {"FEWEST_OPERATORS": 0, "OPERATORS_OF_SWITCH": 0},
    "lit_ort.lower.placed_values": {"_FEWEST_BYTES": 0, "_FEWEST_OF_ALL": 0},
    "lit_ort.lower.small_phases": {"MOST_OPERATORS": 0},
    "lit_ort.lower.work": {"_LEAST_FOR_THREADS": 0},
}


@pytest.fixture(autouse=True)
def low_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in LOW.items():
        for threshold, value in values.items():
            monkeypatch.setattr(importlib.import_module(name), threshold, value)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", mostly(pytest.mark.sweep, CASES, 12))
def test_steps_are_those_of_eager(name: str) -> None:
    test_steps.test_same_as_eager(name)


@pytest.mark.parametrize("first", mostly(pytest.mark.sweep, range(8), 8))
def test_programs_are_those_of_eager(first: int) -> None:
    for number in range(first * PROGRAMS, (first + 1) * PROGRAMS):
        check(draw_program(random.Random(number)))
