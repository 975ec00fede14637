"""Steps that return views of inputs: values, memory and every gradient are those of eager."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.joint.views import LAYOUTS, NO_ERROR, OPERATORS, outcome, sweep
from tests.operators.op_db import FALLBACK, RIGHT

OVERLAPPING = ("expanded rows", "expanded columns", "expanded twice", "overlapping")


def assert_right(outcomes: Iterable[tuple[str, str, str]]) -> None:
    for name, kind, detail in outcomes:
        if kind == FALLBACK:
            assert any(layout in name for layout in OVERLAPPING), name
            assert "elements share memory" in detail, f"{name}: {detail}"
        else:
            assert kind in (RIGHT, NO_ERROR), f"{name}: {kind}: {detail}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "use"), [("narrow", "alone"), ("unbind", "alone"), ("slice", "loss inside")])
def test_a_view_of_an_input(name: str, use: str, layout: str) -> None:
    found = outcome(OPERATORS[name], use, "leaf", layout)
    assert found is not None
    assert_right([(layout, *found)])


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPERATORS)
def test_views_of_inputs(name: str) -> None:
    assert_right(sweep([name]))
