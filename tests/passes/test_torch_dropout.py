from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.kernels.dropout import scale_of
from lit_ort.compiler.passes.torch_dropout import TorchDropout
from tests.passes.models import model, operators, run


def text(ratio: float = 0.0, mode: str = "bool training = {1}", mask_read: bool = False, kind: str = "float") -> str:
    more = ", bool[40, 50] m" if mask_read else ""
    return f"""g ({kind}[40, 50] x, {kind}[40, 50] g) => ({kind}[40, 50] y, {kind}[40, 50] d{more})
        <float ratio = {{{ratio}}}, {mode}> {{
        y, m = Dropout(x, ratio, training)
        d = com.microsoft.DropoutGrad(g, m, ratio, training)
    }}"""


def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(40, 50) + 3, "g": torch.randn(40, 50) + 3}


def test_fires() -> None:
    made = model(text(0.3))
    assert TorchDropout().apply(made).fired == 1
    assert operators(made) == {"ATen"}
    assert [value.name for value in made.graph.outputs] == ["y", "d"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (text(mode="bool training = {0}"), "does not drop"),
        (text(mask_read=True), "its mask is read"),
        (text(kind="double"), "float32 is proven"),
    ],
)
def test_must_not_fire(source: str, reason: str) -> None:
    made = model(source)
    report = TorchDropout().apply(made)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert "Dropout" in operators(made)


def test_same_numbers_without_a_draw() -> None:
    given = inputs()
    made = model(text(0.0))
    expected = run(made, given)
    TorchDropout().apply(made)
    for actual, reference in zip(run(made, given), expected, strict=True):
        torch.testing.assert_close(actual, reference)


def test_the_gradient_has_the_mask_and_scale_of_the_result() -> None:
    given = inputs()
    made = model(text(0.3))
    TorchDropout().apply(made)
    y, d = run(made, given)
    kept = y != 0
    assert 0.6 < kept.float().mean() < 0.8
    torch.testing.assert_close(y, given["x"] * kept * scale_of(0.3))
    torch.testing.assert_close(d, given["g"] * kept * scale_of(0.3))
