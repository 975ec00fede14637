from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.passes.linear_to_gemm import LinearToGemm
from tests.passes.models import model, operators, run

BIASED = """g (float[2, 3, 4] x, float[5, 4] w, float[5] b) => (float[2, 3, 5] y) {
    t = Transpose<perm = [1, 0]>(w)
    p = MatMul(x, t)
    y = Add(p, b)
}"""
PLAIN = "g (float[3, 4] x, float[5, 4] w) => (float[3, 5] y) { t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) }"


def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 3, 4), "w": torch.randn(5, 4), "b": torch.randn(5)}


@pytest.mark.parametrize("text", [BIASED, PLAIN])
def test_fires(text: str) -> None:
    made = model(text)
    report = LinearToGemm().apply(made)
    assert report.fired == 1
    assert "Gemm" in operators(made)
    assert not operators(made) & {"MatMul", "Transpose", "Add"}


def product(x: str, w: str, perm: str = "1, 0") -> str:
    return f"g ({x} x, {w} w) => (y) {{ t = Transpose<perm = [{perm}]>(w) y = MatMul(x, t) }}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (product("float[2, 3, 4]", "float[2, 5, 4]", "0, 2, 1"), "no matrix"),
        (product("double[3, 4]", "double[5, 4]"), "DOUBLE"),
        (product("float[N, 4]", "float[5, 4]"), "not all known"),
    ],
)
def test_must_not_fire(text: str, reason: str) -> None:
    made = model(text)
    report = LinearToGemm().apply(made)
    assert report.fired == 0
    assert reason in " ".join(report.declined)
    assert "MatMul" in operators(made)


def test_something_added_that_is_no_bias_stays_an_add() -> None:
    made = model(BIASED.replace("float[5] b", "float[3, 5] b"))
    assert LinearToGemm().apply(made).fired == 1
    assert "Add" in operators(made)


def test_same_numbers() -> None:
    given = inputs()
    (expected,) = run(model(BIASED), given)
    made = model(BIASED)
    LinearToGemm().apply(made)
    (actual,) = run(made, given)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual, torch.nn.functional.linear(given["x"], given["w"], given["b"]))
