from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.passes.unit_product import UnitProduct
from tests.passes.models import model, operators, run


def text(product: str = "Mul(a, one)", constant: str = "float one = {1.0}", other: str = "z") -> str:
    return f"""g (float[3] x) => (float[3] y, float[3] {other}) <{constant}> {{
        a = Relu(x)
        {product if " = " in product else f"y = {product}"}
        z = Exp(y)
    }}"""


@pytest.mark.parametrize("product", ["Mul(a, one)", "Mul(one, a)", "w = Identity(one) y = Mul(a, w)"])
def test_fires(product: str) -> None:
    made = model(text(product))
    assert UnitProduct().apply(made).fired == 1
    assert operators(made) - {"Identity"} == {"Relu", "Exp"}
    assert [value.name for value in made.graph.outputs] == ["y", "z"]


@pytest.mark.parametrize(
    "source",
    [
        text(constant="float one = {2.0}"),
        # A product with a vector may be broader than its other factor.
        text(constant="float[1] one = {1.0}"),
        # One value can't be two outputs, and an input can't be renamed.
        text(other="a"),
        text("Mul(x, one)"),
        text("Add(a, one)"),
    ],
)
def test_must_not_fire(source: str) -> None:
    made = model(source)
    before = operators(made)
    assert UnitProduct().apply(made).fired == 0
    assert operators(made) == before


def test_same_numbers() -> None:
    given = {"x": torch.randn(3)}
    expected = run(model(text()), given)
    made = model(text())
    UnitProduct().apply(made)
    for actual, reference in zip(run(made, given), expected, strict=True):
        torch.testing.assert_close(actual, reference)
