"""`benchmarks/operators.py`: each case can be timed and has eight shapes, and the table names slower shapes."""

from __future__ import annotations

import pytest

from benchmarks import operators
from benchmarks.operators import CASES, measure_shape, table


@pytest.mark.parametrize("name", CASES)
def test_measures_the_smallest_shape(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = CASES[name].shapes[0]
    line = measure_shape(name, shape, rounds=1)
    assert line["operator"] == name
    assert line["ours_us"] > 0
    assert line["torch_us"] > 0
    assert f'"operator": "{name}"' in capsys.readouterr().out


def test_each_case_has_eight_shapes() -> None:
    assert {len(case.shapes) for case in CASES.values()} == {8}


def test_the_table_names_the_shapes_of_slower_kernels() -> None:
    lines = [
        {"operator": "gelu", "shape": (16, 64), "ours_us": 30.0, "torch_us": 20.0},
        {"operator": "gelu", "shape": (64, 64), "ours_us": 20.0, "torch_us": 20.0},
    ]
    assert table(lines).splitlines()[-1] == "| gelu | 1.50 1.00 | 16x64 |"
    assert operators.SLOWER > 1
