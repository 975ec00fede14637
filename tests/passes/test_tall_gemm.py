from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.passes.tall_gemm import TallGemm
from tests.passes.models import model, operators, run


def text(rows: int = 5000, attributes: str = "transA = 1") -> str:
    return f"g (float[6, {rows}] a, float[6, 8] b) => (float[{rows}, 8] y) {{ y = Gemm<{attributes}>(a, b) }}"


def test_fires() -> None:
    made = model(text())
    assert TallGemm().apply(made).fired == 1
    assert operators(made) == {"Transpose", "MatMul"}


@pytest.mark.parametrize(
    ("rows", "attributes", "reason"),
    [(16, "transA = 1", "not tall"), (5000, "transA = 1, alpha = 2.0", "alpha"), (5000, "transA = 0", None)],
)
def test_must_not_fire(rows: int, attributes: str, reason: str | None) -> None:
    source = text(rows, attributes)
    made = model(source if reason else source.replace(f"float[6, {rows}] a", f"float[{rows}, 6] a"))
    report = TallGemm().apply(made)
    assert report.fired == 0
    assert operators(made) == {"Gemm"}
    assert reason is None or reason in report.declined[0]


def test_same_numbers() -> None:
    given = {"a": torch.randn(6, 5000), "b": torch.randn(6, 8)}
    made = model(text())
    (expected,) = run(made, given)
    TallGemm().apply(made)
    (actual,) = run(made, given)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual, given["a"].T @ given["b"])
