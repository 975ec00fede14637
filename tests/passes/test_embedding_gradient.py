from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.passes.embedding_gradient import EmbeddingGradient
from tests.passes.models import model, operators, run

ROWS, WIDTH = 5000, 32


def text(rows: int = ROWS, axis: int = 0) -> str:
    return f"""g (float[{rows}, {WIDTH}] w, int64[6, 3] i, float[6, 3, {WIDTH}] g) => (float[{rows}, {WIDTH}] d) {{
        s = Shape(w)
        d = com.microsoft.GatherGrad<axis = {axis}>(s, i, g)
    }}"""


def inputs() -> dict[str, torch.Tensor]:
    indices = torch.randint(-ROWS, ROWS, (6, 3))
    indices[2] = indices[1]
    return {"w": torch.randn(ROWS, WIDTH), "i": indices, "g": torch.randn(6, 3, WIDTH)}


def test_fires() -> None:
    made = model(text())
    assert EmbeddingGradient().apply(made).fired == 1
    assert operators(made) == {"Shape", "ATen"}


@pytest.mark.parametrize(("rows", "axis", "reason"), [(50, 0, "smaller than"), (ROWS, 1, "another axis")])
def test_must_not_fire(rows: int, axis: int, reason: str) -> None:
    made = model(text(rows, axis))
    report = EmbeddingGradient().apply(made)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert "GatherGrad" in operators(made)


def test_same_numbers() -> None:
    given = inputs() | {"i": torch.randint(ROWS, (6, 3))}
    (expected,) = run(model(text()), given)
    made = model(text())
    EmbeddingGradient().apply(made)
    (actual,) = run(made, given)
    torch.testing.assert_close(actual, expected)


def test_negative_indices_count_from_the_end() -> None:
    given = inputs()
    made = model(text())
    EmbeddingGradient().apply(made)
    (actual,) = run(made, given)
    table = given["w"].requires_grad_()
    (eager,) = torch.autograd.grad(table[given["i"]], table, given["g"])
    torch.testing.assert_close(actual, eager)
