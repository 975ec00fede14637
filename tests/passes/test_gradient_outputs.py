from __future__ import annotations

import torch

from lit_ort.compiler.passes.gradient_outputs import GradientOutputs
from tests.passes.models import model, operators, run

TEXT = """g (float[3, 4] x, float[4] s, float[4] b) => (float[3, 4] y)
    <float ratio = {0.0}, bool training = {1}> {
    n = LayerNormalization<axis = -1>(x, s, b)
    y = Dropout(n, ratio, training)
}"""


def test_fires() -> None:
    made = model(TEXT)
    assert GradientOutputs().apply(made).fired == 2
    outputs = {node.op_type: [value.name for value in node.outputs] for node in made.graph}
    assert outputs == {"LayerNormalization": ["n", "n__1", "n__2"], "Dropout": ["y", "y__1"]}
    norm = next(node for node in made.graph if node.op_type == "LayerNormalization")
    assert list(norm.outputs[1].shape or ()) == [3, 1]


def test_must_not_fire_twice_or_elsewhere() -> None:
    made = model(TEXT)
    GradientOutputs().apply(made)
    assert GradientOutputs().apply(made).fired == 0
    other = model("g (float[3] x) => (float[3] y) { y = Relu(x) }")
    assert GradientOutputs().apply(other).fired == 0
    assert operators(other) == {"Relu"}


def test_same_numbers() -> None:
    given = {"x": torch.randn(3, 4), "s": torch.randn(4), "b": torch.randn(4)}
    made = model(TEXT)
    (expected,) = run(made, given)
    GradientOutputs().apply(made)
    (actual,) = run(made, given)
    torch.testing.assert_close(actual, expected)
