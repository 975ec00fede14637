"""Each operator with a kernel of ours can be timed beside torch's own, and every operator has a case."""

from __future__ import annotations

import pytest

from benchmarks import operators
from benchmarks.operators import CASES, measured, table


@pytest.mark.parametrize("name", CASES)
def test_measures_the_smallest_shape(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = CASES[name].shapes[0]
    line = measured(name, shape, rounds=1)
    assert line["operator"] == name
    assert line["ours_us"] > 0
    assert line["torch_us"] > 0
    assert f'"operator": "{name}"' in capsys.readouterr().out


def test_eight_shapes_each() -> None:
    assert {len(case.shapes) for case in CASES.values()} == {8}


def test_the_table_names_where_a_kernel_loses() -> None:
    lines = [
        {"operator": "gelu", "shape": (16, 64), "ours_us": 30.0, "torch_us": 20.0},
        {"operator": "gelu", "shape": (64, 64), "ours_us": 20.0, "torch_us": 20.0},
    ]
    assert table(lines).splitlines()[-1] == "| gelu | 1.50 1.00 | 16x64 |"
    assert operators.LOST > 1
