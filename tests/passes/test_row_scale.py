from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.passes.row_scale import RowScale
from tests.passes.models import model, operators, run

N, C, W = 8, 2**17, 4
INPUTS = f"float[{N}, {C}] d, float[{N}, 1] s, float[{C}, {W}] w, float[{N}, {W}] h"
OUTPUTS = f"float[{N}, {W}] dh, float[{C}, {W}] dw, float[{C}] db"
CONSTANTS = f"int64[3] three = {{2, 4, {C}}}, int64[2] two = {{{N}, {C}}}, int64[1] rows = {{0}}"
TEXT = f"""g ({INPUTS}) => ({OUTPUTS}) <{CONSTANTS}> {{
    m = Mul(d, s)
    r = Reshape(m, three)
    f = Reshape(r, two)
    dh = Gemm(f, w)
    dw = Gemm<transA = 1>(f, h)
    db = ReduceSum<keepdims = 0>(f, rows)
}}"""


def inputs() -> dict[str, torch.Tensor]:
    return {"d": torch.randn(N, C), "s": torch.randn(N, 1), "w": torch.randn(C, W), "h": torch.randn(N, W)}


def test_fires() -> None:
    made = model(TEXT)
    assert RowScale().apply(made).fired == 1
    assert "ReduceSum" not in operators(made)
    sizes = [node.outputs[0].shape for node in made.graph if node.op_type == "Mul"]
    assert sorted([list(shape or ()) for shape in sizes]) == [[N, W], [N, W]]
    assert [value.name for value in made.graph.outputs] == ["dh", "dw", "db"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TEXT.replace("dh = Gemm(f, w)", "x = Exp(f) dh = Gemm(x, w)"), "Exp) can't carry"),
        (TEXT.replace("Gemm(f, w)", "Gemm<alpha = 2.0>(f, w)"), "can't carry"),
        (TEXT.replace("dh = Gemm(f, w)", "x = Exp(r) y = Reshape(x, two) dh = Gemm(y, w)"), "another shape"),
    ],
)
def test_must_not_fire(text: str, reason: str) -> None:
    made = model(text)
    before = sorted(operators(made))
    report = RowScale().apply(made)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert sorted(operators(made)) == before


def test_small_and_other_products_are_not_meant() -> None:
    small = model(TEXT.replace(str(C), "16"))
    assert RowScale().apply(small).fired == 0
    assert RowScale().apply(small).declined == ()


def test_same_numbers() -> None:
    given = inputs()
    expected = run(model(TEXT), given)
    made = model(TEXT)
    RowScale().apply(made)
    for actual, wanted in zip(run(made, given), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-3)
