from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from lit_ort.compiler.autocast import BY_NODE, PRECISION
from lit_ort.compiler.passes.bf16_products import Bf16Products
from lit_ort.compiler.sizes import sizes_of
from lit_ort.errors import ConvertError
from lit_ort.options import BF16_MIXED, FLOAT32
from tests.compare import relative_error
from tests.passes.models import model, operators, run

GEMM = "g (float[200, 64] a, float[96, 64] b, float[96] c) => (float[200, 96] y) { y = Gemm<transB = 1>(a, b, c) }"
ROWS = "g (float[5, 40, 64] a, float[64, 96] b) => (float[5, 40, 96] y) { y = MatMul(a, b) }"
STACKS = "g (float[2, 3, 40, 64] a, float[2, 3, 64, 96] b) => (float[2, 3, 40, 96] y) { y = MatMul(a, b) }"
SMALL = "g (float[2, 64] a, float[64, 3] b) => (float[2, 3] y) { y = MatMul(a, b) }"
BROADCAST = "g (float[5, 40, 64] a, float[1, 64, 96] b) => (float[5, 40, 96] y) { y = MatMul(a, b) }"
SQUARE = "g (float[200, 200] a) => (float[200, 200] y) { y = MatMul(a, a) }"
SCALED = "g (float[200, 64] a, float[64, 96] b) => (float[200, 96] y) { y = Gemm<alpha = 2.0>(a, b) }"
DOUBLE = "g (double[200, 64] a, double[64, 96] b) => (double[200, 96] y) { y = MatMul(a, b) }"


def made(text: str, precision: str = BF16_MIXED) -> ir.Model:
    graph = model(text)
    graph.metadata_props[PRECISION] = precision
    return graph


@pytest.mark.parametrize("text", [GEMM, ROWS, STACKS])
def test_fires(text: str) -> None:
    graph = made(text)
    assert Bf16Products().apply(graph).fired == 1
    assert operators(graph) - {"Reshape"} == {"ATen"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SMALL, "fewer than 2e+06"),
        (BROADCAST, "leading dimensions"),
        (SQUARE, "both factors are one value"),
        (SCALED, "alpha or beta"),
        (DOUBLE, "float32 is proven"),
    ],
)
def test_must_not_fire(text: str, reason: str) -> None:
    graph = made(text)
    before = operators(graph)
    report = Bf16Products().apply(graph)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert operators(graph) == before


def test_precision_decides_node_by_node() -> None:
    assert Bf16Products().apply(made(GEMM, FLOAT32)).fired == 0
    for precision, fired in ((FLOAT32, 0), (BF16_MIXED, 1)):
        graph = made(GEMM, BY_NODE)
        graph.graph[0].metadata_props[PRECISION] = precision
        assert Bf16Products().apply(graph).fired == fired
    with pytest.raises(ConvertError, match="can't be told"):
        Bf16Products().apply(made(GEMM, BY_NODE))


@pytest.mark.parametrize("text", [GEMM, ROWS, STACKS])
def test_numbers_are_those_of_rounded_factors(text: str) -> None:
    graph = made(text)
    given = {str(v.name): torch.randn(sizes_of(v) or ()) for v in graph.graph.inputs}
    (expected,) = run(made(text), {name: tensor.bfloat16().float() for name, tensor in given.items()})
    Bf16Products().apply(graph)
    (actual,) = run(graph, given)
    assert actual.dtype == torch.float32
    # The result is rounded as well.
    assert relative_error(actual, expected) < 2**-8
