from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from lit_ort.compiler.kernel_nodes import kernel_of
from lit_ort.compiler.passes.bf16_values import Bf16Values
from lit_ort.compiler.sizes import sizes_of
from tests.passes.models import model, run


def call(kernel: str, *given: str) -> str:
    return f'org.pytorch.aten.ATen<operator = "lit_ort::{kernel}", overload_name = "">({", ".join(given)})'


def kernels(graph: ir.Model) -> list[str]:
    return [kernel_of(node) or node.op_type for node in graph.graph]


INPUTS = "float[8, 6] x, float[10, 6] w, float[10] c, float[6, 10] v"
LAYERS = f"""g ({INPUTS}) => (float[8, 6] y) <float[8, 10] h, float[4, 20] g> {{
    h = {call("bf16_gemm_nt_bias", "x", "w", "c")}
    s = Constant<value_ints = [4, 20]>()
    moved = Reshape(h, s)
    back = Constant<value_ints = [8, 10]>()
    g = {call("gelu", "moved")}
    again = Reshape(g, back)
    y = {call("bf16_gemm_nt", "again", "v")}
}}"""
SHARED = f"""g (float[8, 6] x, float[10, 6] w, float[10, 6] u) => (float[8, 10] y, float[8, 10] z) {{
    y = {call("bf16_gemm_nt", "x", "w")}
    z = {call("bf16_gemm_nt", "x", "u")}
}}"""
FULL = "float[8, 6] x, float[10, 6] w, float[6, 10] v"
READ_IN_FULL = f"""g ({FULL}) => (float[8, 6] y, float[8, 10] z) <float[8, 10] h> {{
    h = {call("bf16_gemm_nt", "x", "w")}
    z = Relu(h)
    y = {call("bf16_gemm_nt", "h", "v")}
}}"""
FLOATS = """g (float[8, 6] x, float[6, 10] w) => (float[8, 10] y) { y = MatMul(x, w) }"""
GELU_OF_FLOATS = f"""g (float[8, 6] x, float[10, 6] w) => (float[8, 10] y) <float[8, 6] a> {{
    a = {call("gelu", "x")}
    y = {call("bf16_gemm_nt", "a", "w")}
}}"""
SUMMED = f"""g (float[8, 6] x, float[10, 6] w, float[10, 6] v) => (float[8, 6] y, float[10] s) <float[8, 10] h> {{
    h = {call("bf16_gemm_nt", "x", "w")}
    y = {call("bf16_gemm_nn", "h", "v")}
    s = {call("bf16_row_sum", "h")}
}}"""


def test_fires_between_kernels() -> None:
    graph = model(LAYERS)
    # Three factors and four values between the products.
    assert Bf16Values().apply(graph).fired == 3 + 4
    between = {value.name: value.dtype for node in graph.graph for value in node.outputs}
    assert {between[name] for name in ("h", "moved", "g", "again")} == {ir.DataType.BFLOAT16}
    assert kernels(graph).count("bf16_round") == 3
    assert "bf16_gemm_nt_bias_rounded" in kernels(graph)


def test_a_value_is_rounded_once() -> None:
    graph = model(SHARED)
    assert Bf16Values().apply(graph).fired == 3
    assert kernels(graph).count("bf16_round") == 3


def test_a_sum_of_rows_takes_either() -> None:
    graph = model(SUMMED)
    Bf16Values().apply(graph)
    assert "bf16_gemm_nt_rounded" in kernels(graph)


@pytest.mark.parametrize(
    ("text", "kept"), [(READ_IN_FULL, "bf16_gemm_nt"), (GELU_OF_FLOATS, "gelu"), (FLOATS, "MatMul")]
)
def test_must_not_fire_where_float32_is_read(text: str, kept: str) -> None:
    graph = model(text)
    Bf16Values().apply(graph)
    assert kept in kernels(graph)
    assert not any(name.endswith("_rounded") for name in kernels(graph))


@pytest.mark.parametrize("text", [LAYERS, SHARED, READ_IN_FULL, GELU_OF_FLOATS, SUMMED])
def test_numbers_move_by_rounding_alone(text: str) -> None:
    plain, graph = model(text), model(text)
    given = {str(v.name): torch.randn(sizes_of(v) or ()) for v in graph.graph.inputs}
    Bf16Values().apply(graph)
    for actual, expected in zip(run(graph, given), run(plain, given), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=6e-2)
