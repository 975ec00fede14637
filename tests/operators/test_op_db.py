"""A part of torch's database of operators beside eager; `python -m tests.operators.op_db` takes all of it."""

from __future__ import annotations

import pytest

from tests.operators.op_db import BAD, name_of, operators, outcomes

# What once failed: values without strides or memory at the border to ONNX Runtime, orders of columns.
KNOWN = ("sgn", "cholesky", "linalg.inv", "linalg.eig", "triangular_solve", "linalg.ldl_factor")
STRIDE = 25
OPERATORS = {name_of(op): op for op in operators()}
CHOSEN = sorted({*KNOWN, *sorted(OPERATORS)[::STRIDE]})


@pytest.mark.parametrize("name", CHOSEN)
def test_as_eager(name: str) -> None:
    found = outcomes(OPERATORS[name])
    assert found
    assert not [outcome for outcome in found if outcome.kind in BAD]
