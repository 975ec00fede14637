from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.passes.torch_layer_norm import TorchLayerNorm
from tests.passes.models import model, operators, run

FORWARD = """g (float[400, 50] x, float[50] w, float[50] b) => (float[400, 50] y) {{
    y = LayerNormalization<axis = {axis}, epsilon = 1e-3>({given})
}}"""
BOTH = """g (float[400, 50] x, float[50] w, float[50] b, float[400, 50] g) =>
    (float[400, 50] y, float[400, 50] dx, float[50] dw, float[50] db) {
    y, m, s = LayerNormalization<axis = -1, epsilon = 1e-3>(x, w, b)
    dx, dw, db = com.microsoft.LayerNormalizationGrad<axis = -1>(g, x, w, m, s)
}"""


def inputs() -> dict[str, torch.Tensor]:
    wide = {name: torch.randn(400, 50) * 3 + 1 for name in "xg"}
    return {"x": wide["x"], "w": torch.randn(50), "b": torch.randn(50), "g": wide["g"]}


def forward(given: str = "x, w, b", axis: int = -1) -> str:
    return FORWARD.format(given=given, axis=axis)


def test_fires() -> None:
    made = model(BOTH)
    assert TorchLayerNorm().apply(made).fired == 2
    assert operators(made) == {"ATen", "Constant"}
    assert [value.name for value in made.graph.outputs] == ["y", "dx", "dw", "db"]


@pytest.mark.parametrize("given", ["x, w, b", "x, w"])
def test_fires_where_nobody_wants_gradients(given: str) -> None:
    made = model(forward(given))
    assert TorchLayerNorm().apply(made).fired == 1
    x, w, b = (value for name, value in inputs().items() if name != "g")
    (y,) = run(made, {"x": x, "w": w, "b": b})
    bias = b if "b" in given else None
    expected = torch.nn.functional.layer_norm(x, (50,), w, bias, 1e-3)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (forward().replace("float[400, 50] x", "float[some, 50] x"), "known dimensions"),
        (forward(axis=0), "more than the last dimension"),
    ],
)
def test_must_not_fire(source: str, reason: str) -> None:
    made = model(source)
    report = TorchLayerNorm().apply(made)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert operators(made) == {"LayerNormalization"}


def test_same_numbers() -> None:
    given = inputs()
    expected = run(model(BOTH), given)
    made = model(BOTH)
    TorchLayerNorm().apply(made)
    for actual, reference in zip(run(made, given), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-4)


def test_keeps_its_digits_far_from_zero() -> None:
    given = {**inputs(), "x": torch.randn(400, 50) + 1000}
    made = model(BOTH)
    TorchLayerNorm().apply(made)
    x = given["x"].double()
    exact = torch.nn.functional.layer_norm(x, (50,), given["w"].double(), given["b"].double(), 1e-3)
    errors = [float((y - exact).norm() / exact.norm()) for y in (run(made, given)[0], run(model(BOTH), given)[0])]
    assert errors[0] < 1e-4
    assert errors[0] < errors[1] / 10, errors


def test_as_eager() -> None:
    given = inputs()
    made = model(BOTH)
    TorchLayerNorm().apply(made)
    actual = run(made, given)
    x, w, b = (given[name].double().requires_grad_() for name in "xwb")
    y = torch.nn.functional.layer_norm(x, (50,), w, b, 1e-3)
    expected = [y.detach(), *torch.autograd.grad(y, (x, w, b), given["g"].double())]
    for found, reference in zip(actual, expected, strict=True):
        assert float((found - reference).norm() / reference.norm()) < 1e-6
