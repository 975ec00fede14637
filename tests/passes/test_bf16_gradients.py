from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from lit_ort.compiler.kernels.bf16 import GRADIENT, gemm_name, matmul_name
from lit_ort.compiler.passes.bf16_gradients import Bf16Gradients
from tests.compare import relative_error
from tests.passes.models import model, operators, run

M, K, N = 30, 20, 10
BOTH = (False, True)


def text(kernel: str, a: tuple[int, ...], b: tuple[int, ...], y: tuple[int, ...], bias: bool, wanted: str) -> str:
    """The gradient node of a product; `wanted` names the gradients that are read."""
    shapes = {"da": a, "db": b, "dc": (N,)}
    inputs = ", ".join(f"float{list(shape)} {name}" for name, shape in (("dy", y), ("a", a), ("b", b)))
    outputs = ", ".join(f"float{list(shapes[name])} {name}" for name in wanted.split())
    results = ", ".join(name if name in wanted else '""' for name in (["da", "db", "dc"] if bias else ["da", "db"]))
    operator = f'operator = "lit_ort::{kernel}{GRADIENT}", overload_name = ""'
    return f"g ({inputs}) => ({outputs}) {{ {results} = org.pytorch.aten.ATen<{operator}>(dy, a, b) }}"


def products(graph: ir.Model) -> list[str]:
    return [node.attributes.get_string("operator", "") for node in graph.graph]


@pytest.mark.parametrize("wanted", ["da db dc", "db dc", "da"])
def test_fires_for_what_is_read(wanted: str) -> None:
    graph = model(text(gemm_name(False, True, bias=True), (M, K), (N, K), (M, N), True, wanted))
    assert Bf16Gradients().apply(graph).fired == 1
    names = {"da": "bf16_gemm_nn", "db": "bf16_gemm_tn", "dc": "bf16_row_sum"}
    assert products(graph) == [f"lit_ort::{names[name]}" for name in wanted.split()]


def test_must_not_fire() -> None:
    kernel = 'ATen<operator = "lit_ort::bf16_gemm_nn", overload_name = "">'
    graph = model(f"g (float[3, 4] a, float[4, 5] b) => (float[3, 5] y) {{ y = org.pytorch.aten.{kernel}(a, b) }}")
    assert Bf16Gradients().apply(graph).fired == 0
    assert operators(graph) == {"ATen"}


@pytest.mark.parametrize("stacked", BOTH)
@pytest.mark.parametrize("transpose_b", BOTH)
@pytest.mark.parametrize("transpose_a", BOTH)
def test_numbers_are_those_of_autograd(transpose_a: bool, transpose_b: bool, stacked: bool) -> None:
    front = (2, 3) if stacked else ()
    shapes = ((K, M) if transpose_a else (M, K)), ((N, K) if transpose_b else (K, N)), (M, N)
    a, b, dy = (torch.randn(*front, *shape).bfloat16().float() for shape in shapes)
    name = (matmul_name if stacked else gemm_name)(transpose_a, transpose_b)
    graph = model(text(name, tuple(a.shape), tuple(b.shape), tuple(dy.shape), False, "da db"))
    assert Bf16Gradients().apply(graph).fired == 1
    actual = run(graph, {"dy": dy, "a": a, "b": b})
    leaves = [a.requires_grad_(), b.requires_grad_()]
    y = (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)
    for found, expected in zip(actual, torch.autograd.grad(y, leaves, dy), strict=True):
        assert relative_error(found, expected) < 2**-8
