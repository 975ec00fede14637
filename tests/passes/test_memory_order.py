from __future__ import annotations

import torch

from lit_ort.compiler.liveness import peak_bytes
from lit_ort.compiler.passes.memory_order import MemoryOrder
from tests.passes.models import model, run

# Three weights' gradients, all computed after the way down, as the builder orders them.
LATE = """g (float[100, 40] x, float[40, 40] w) => (float[40, 40] a, float[40, 40] b, float[40, 40] c) {
    x1 = MatMul(x, w)
    x2 = MatMul(x1, w)
    d2 = Relu(x2)
    d1 = MatMul(d2, w)
    d0 = MatMul(d1, w)
    a = Gemm<transA = 1>(x2, d2)
    b = Gemm<transA = 1>(x1, d1)
    c = Gemm<transA = 1>(x, d0)
}"""


def test_fires_and_holds_less() -> None:
    made = model(LATE)
    before = peak_bytes(made.graph)
    assert MemoryOrder().apply(made).fired == 1
    assert peak_bytes(made.graph) < before
    order = [node.outputs[0].name for node in made.graph]
    assert order.index("a") < order.index("d1") < order.index("b") < order.index("d0")


def test_must_not_fire_on_a_split_graph() -> None:
    made = model("g (float[3] x) => (float[3] y) { a = Neg(x) b = com.microsoft.YieldOp(a) y = Neg(b) }")
    report = MemoryOrder().apply(made)
    assert report.fired == 0
    assert "split into forward and backward" in report.declined[0]


def test_an_order_that_is_best_stays() -> None:
    made = model("g (float[3] x) => (float[3] y) { a = Neg(x) y = Relu(a) }")
    assert MemoryOrder().apply(made).fired == 0


def test_same_numbers() -> None:
    given = {"x": torch.randn(100, 40), "w": torch.randn(40, 40)}
    expected = run(model(LATE), given)
    made = model(LATE)
    MemoryOrder().apply(made)
    for actual, reference in zip(run(made, given), expected, strict=True):
        assert torch.equal(actual, reference)
