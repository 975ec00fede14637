from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from lit_ort.compiler.kernel_nodes import kernel_of
from lit_ort.compiler.kernels import KERNELS
from lit_ort.compiler.passes.optimizer_updates import OptimizerUpdates
from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.session import Session, SessionOptions
from lit_ort.runtime.updates import HAND_OVER, Updates
from tests.passes.models import model, run

# `w` is read by `y`, which its gradient needs, by `dx`, and scaled and turned by `z`.
TEXT = """g (float[4, 3] w, float[2, 4] x, float[2, 3] g) => (float[2, 3] y, float[2, 4] z, float[4, 3] w_grad)
    <float half = {0.5}> {
    y = MatMul(x, w)
    e = Mul(y, g)
    dw = Gemm<transA = 1>(x, e)
    scaled = Mul(w, half)
    turned = Transpose<perm = [1, 0]>(scaled)
    dx = MatMul(e, turned)
    z = Identity(dx)
    w_grad = Identity(dw)
}"""


def updated() -> ir.Model:
    graph = model(TEXT)
    assert OptimizerUpdates().apply(graph).fired == 1
    return graph


def inputs() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(4, 3), "x": torch.randn(2, 4), "g": torch.randn(2, 3)}


def test_fires() -> None:
    graph = updated()
    (node,) = (node for node in graph.graph if kernel_of(node) == HAND_OVER)
    # `y` is computed before the gradient in any case.
    assert [value.name for value in node.inputs if value is not None] == [
        "w_grad__made",
        "w",
        "scaled",
        "turned",
        "dx",
    ]
    assert [value.name for value in graph.graph.outputs] == ["y", "z", "w_grad"]


def test_must_not_fire() -> None:
    graph = model("g (float[4] w) => (float[4] w_gradient, float[4] v_grad) { w_gradient = Neg(w) v_grad = Exp(w) }")
    assert OptimizerUpdates().apply(graph).fired == 0
    assert not any(kernel_of(node) for node in graph.graph)


@pytest.mark.parametrize("changes", [False, True])
def test_same_numbers(changes: bool) -> None:
    """Also where the parameter changes in the run: whoever reads it has done so before."""
    given = inputs()
    expected = run(model(TEXT), given)

    def change(pool: object, gradient: torch.Tensor, parameter: torch.Tensor, *awaited: torch.Tensor) -> torch.Tensor:
        parameter.fill_(torch.nan)
        return gradient

    kernel = Kernel(HAND_OVER, change) if changes else Updates(BufferPool()).kernel
    options = SessionOptions(1, kernels={**KERNELS, HAND_OVER: kernel})
    actual = Session(updated(), list(given), ["y", "z", "w_grad"], options).run(list(given.values()))
    for result, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, reference)
    assert bool(given["w"].isnan().all()) == changes
