from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.passes.cross_entropy_gradient import CrossEntropyGradient
from tests.passes.models import model, operators, run


def text(axis: int = 1, columns: int = 1) -> str:
    return f"""g (float[5, 7] x, int64[5, {columns}] i, float[5, {columns}] g) => (float[5, 7] d) {{
        p = LogSoftmax<axis = {axis}>(x)
        s = Shape(p)
        z = com.microsoft.GatherElementsGrad<axis = {axis}>(g, s, i)
        d = com.microsoft.LogSoftmaxGrad_13<axis = {axis}>(z, p)
    }}"""


def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(5, 7) * 4, "i": torch.randint(7, (5, 1)), "g": torch.randn(5, 1)}


def test_fires() -> None:
    made = model(text())
    assert CrossEntropyGradient().apply(made).fired == 1
    assert {"Exp", "ScatterElements"} <= operators(made)
    assert not operators(made) & {"GatherElementsGrad", "LogSoftmaxGrad_13"}


@pytest.mark.parametrize(("axis", "columns", "reason"), [(1, 2, "one entry a row"), (0, 1, "axis 0")])
def test_must_not_fire(axis: int, columns: int, reason: str) -> None:
    made = model(text(axis, columns))
    report = CrossEntropyGradient().apply(made)
    assert report.fired == 0
    assert reason in report.declined[0]


def test_same_numbers() -> None:
    given = inputs()
    (expected,) = run(model(text()), given)
    made = model(text())
    CrossEntropyGradient().apply(made)
    (actual,) = run(made, given)
    torch.testing.assert_close(actual, expected)
    x = given["x"].clone().requires_grad_()
    (eager,) = torch.autograd.grad(x.log_softmax(1).gather(1, given["i"]), x, given["g"])
    torch.testing.assert_close(actual, eager)
