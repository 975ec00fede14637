from __future__ import annotations

import json

import onnx_ir as ir
import pytest
import torch

from lit_ort.compiler.liveness import peak_bytes
from lit_ort.compiler.passes.memory_order import MemoryOrder
from lit_ort.compiler.passes.recompute import Recompute
from lit_ort.compiler.passes.torch_dropout import TorchDropout
from lit_ort.compiler.regions import REGION, RESULTS
from tests.passes.models import model, run

# Two layers of a product and two activations; the backward reads what is inside of them.
LAYERS = """g (float[50, 40] x, float[40, 40] v, float[40, 40] w, float[50, 40] g) =>
    (float[50, 40] y, float[40, 40] v_grad, float[40, 40] w_grad) {
    a = MatMul(x, v)
    b = Tanh(a)
    c = Relu(b)
    d = MatMul(c, w)
    e = Tanh(d)
    y = Relu(e)
    h = Neg(g)
    i = Mul(h, e)
    j = Mul(i, d)
    w_grad = Gemm<transA = 1>(c, j)
    k = MatMul(j, w)
    l = Mul(k, b)
    m = Mul(l, a)
    v_grad = Gemm<transA = 1>(x, m)
}"""
SHAPES = {"x": (50, 40), "v": (40, 40), "w": (40, 40), "g": (50, 40)}
FIRST, SECOND = ("a", "b", "c"), ("d", "e", "y")


def marked(text: str, *regions: tuple[str, ...]) -> ir.Model:
    """A model whose first output is the forward's result, and whose named values belong to regions."""
    made = model(text)
    made.metadata_props[RESULTS] = json.dumps([made.graph.outputs[0].name])
    for number, values in enumerate(regions):
        for node in made.graph:
            if node.outputs[0].name in values:
                node.metadata_props[REGION] = f"layers.{number}"
    return made


def inputs() -> dict[str, torch.Tensor]:
    return {name: torch.randn(*shape) for name, shape in SHAPES.items()}


def names(made: ir.Model) -> list[str | None]:
    return [node.outputs[0].name for node in made.graph]


def test_fires_and_holds_less() -> None:
    made, kept = marked(LAYERS, FIRST, SECOND), marked(LAYERS)
    assert Recompute().apply(made).fired == 4
    order = names(made)
    # c crosses the border between the layers and is kept; the copies stand right before their first reader.
    assert "c__again" not in order
    waiting = "c__after__layers.1"
    assert order[order.index("h") : order.index("i") + 1] == ["h", waiting, "d__again", "e__again", "i"]
    for graph in (made, kept):
        MemoryOrder().apply(graph)
    assert peak_bytes(made.graph) < peak_bytes(kept.graph)


def test_copies_wait_for_the_first_gradient_of_their_region() -> None:
    made = marked(LAYERS, FIRST, SECOND)
    Recompute().apply(made)
    read = {node.outputs[0].name: [value.name for value in node.inputs if value is not None] for node in made.graph}
    assert read["c__after__layers.1"] == ["c", "h"]
    assert read["d__again"] == ["c__after__layers.1", "w"]
    assert read["x__after__layers.0"] == ["x", "k"]
    assert read["a__again"] == ["x__after__layers.0", "v"]
    assert read["b__again"] == ["a__again"]


def test_must_not_fire_without_regions() -> None:
    assert Recompute().apply(marked(LAYERS)).fired == 0


def test_what_another_part_of_the_forward_reads_is_kept() -> None:
    made = marked(LAYERS.replace("y = Relu(e)", "y = Add(e, a)"), FIRST, SECOND)
    Recompute().apply(made)
    assert "a__again" not in names(made)
    assert "b__again" in names(made)


def test_a_shape_does_not_make_the_backward_compute_again() -> None:
    made = marked(LAYERS.replace("h = Neg(g)", "h = Neg(g) s = Shape(b)").replace("l = Mul(k, b)", "l = Neg(k)"), FIRST)
    Recompute().apply(made)
    assert "b__again" not in names(made)


def test_same_numbers() -> None:
    given = inputs()
    expected = run(model(LAYERS), given)
    made = marked(LAYERS, FIRST, SECOND)
    Recompute().apply(made)
    for ordered in (False, True):
        if ordered:
            MemoryOrder().apply(made)
        for actual, reference in zip(run(made, given), expected, strict=True):
            assert torch.equal(actual, reference)


DROPPED = """g (float[50, 40] x, float[50, 40] g) => (float[50, 40] y, float[50, 40] x_grad)
    <float ratio = {0.5}, bool yes = {1}> {
    a = Tanh(x)
    b, mask = Dropout(a, ratio, yes)
    c = Tanh(b)
    y = Neg(c)
    h = Neg(g)
    i = Mul(h, c)
    j = Mul(i, b)
    x_grad = com.microsoft.DropoutGrad(j, mask, ratio, yes)
}"""


@pytest.mark.usefixtures("one_thread")
def test_dropout_drops_the_same_again() -> None:
    made = marked(DROPPED, ("a", "b", "c", "y"))
    TorchDropout().apply(made)
    # y = -c and the gradient reads c and b: with g = -1 everywhere it is c b where b was kept.
    assert Recompute().apply(made).fired == 3
    before = torch.randn(50, 40)
    x = before.clone()
    y, x_grad = run(made, {"x": x, "g": -torch.ones(50, 40)})
    kept = y != 0
    assert 0.4 < kept.float().mean() < 0.6
    b = torch.where(kept, 2 * before.tanh(), 0)
    torch.testing.assert_close(y, -b.tanh())
    torch.testing.assert_close(x_grad, 2 * b.tanh() * b)
    # ONNX Runtime computes in place where it can, and x is not its own.
    assert torch.equal(x, before)
