from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.passes.torch_gelu import TorchGelu
from tests.passes.models import model, operators, run

GRAPH = "g (float[{n}, 50] x, float[{n}, 50] g) => (float[{n}, 50] y, float[{n}, 50] d)"


def text(kind: str = "", rows: int = 400) -> str:
    return (
        GRAPH.format(n=rows)
        + f"""{{
        y = com.microsoft.{kind}Gelu(x)
        d = com.microsoft.{kind}GeluGrad(g, x)
    }}"""
    )


def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(400, 50) * 3, "g": torch.randn(400, 50)}


@pytest.mark.parametrize("kind", ["", "Fast"])
def test_fires(kind: str) -> None:
    made = model(text(kind))
    assert TorchGelu().apply(made).fired == 2
    assert operators(made) == {"ATen"}
    assert [value.name for value in made.graph.outputs] == ["y", "d"]


WITH_BIAS = "g (float[400, 50] x, float[50] b) => (float[400, 50] y) { y = com.microsoft.FastGelu(x, b) }"
APPROXIMATE = 'g (float[400, 50] x) => (float[400, 50] y) { y = Gelu<approximate = "tanh">(x) }'


@pytest.mark.parametrize(
    ("source", "reason"),
    [(text(rows=10), "smaller than"), (WITH_BIAS, "adds a bias"), (APPROXIMATE, "approximate")],
)
def test_must_not_fire(source: str, reason: str) -> None:
    made = model(source)
    before = operators(made)
    report = TorchGelu().apply(made)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert operators(made) == before


@pytest.mark.parametrize("kind", ["", "Fast"])
def test_same_numbers(kind: str) -> None:
    given = inputs()
    expected = run(model(text(kind)), given)
    made = model(text(kind))
    TorchGelu().apply(made)
    for actual, reference in zip(run(made, given), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "approximate"), [("", "none"), ("Fast", "tanh")])
def test_as_eager(kind: str, approximate: str) -> None:
    given = inputs()
    made = model(text(kind))
    TorchGelu().apply(made)
    y, d = run(made, given)
    x = given["x"].double().requires_grad_()
    reference = torch.nn.functional.gelu(x, approximate=approximate)
    (gradient,) = torch.autograd.grad(reference, x, given["g"].double())
    torch.testing.assert_close(y.double(), reference.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d.double(), gradient, rtol=1e-5, atol=1e-5)
