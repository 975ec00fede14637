from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.passes.large_gemm import LargeGemm
from lit_ort.runtime.session import Session, SessionOptions
from tests.passes.models import KERNELS, model, operators, run

M, K, N = 900, 700, 800
PLAIN = {"transA": 0, "transB": 0}


def text(transpose_a: int = 0, transpose_b: int = 0, bias: bool = False, extra: str = "", rows: int = M) -> str:
    a = (K, rows) if transpose_a else (rows, K)
    b = (N, K) if transpose_b else (K, N)
    inputs = f"float[{a[0]}, {a[1]}] a, float[{b[0]}, {b[1]}] b" + (f", float[{N}] c" if bias else "")
    attributes = f"transA = {transpose_a}, transB = {transpose_b}{extra}"
    arguments = "a, b, c" if bias else "a, b"
    return f"g ({inputs}) => (float[{rows}, {N}] y) {{ y = Gemm<{attributes}>({arguments}) }}"


def test_fires() -> None:
    made = model(text())
    assert LargeGemm().apply(made).fired == 1
    assert operators(made) == {"ATen"}
    assert list(made.graph.outputs[0].shape or ()) == [M, N]


@pytest.mark.parametrize(
    ("source", "reason"),
    [(text(rows=2), "fewer than 2e+07"), (text(extra=", alpha = 2.0"), "alpha or beta")],
)
def test_must_not_fire(source: str, reason: str) -> None:
    made = model(source)
    report = LargeGemm().apply(made)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert operators(made) == {"Gemm"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transpose_b", [0, 1])
@pytest.mark.parametrize("transpose_a", [0, 1])
def test_same_numbers(transpose_a: int, transpose_b: int, bias: bool) -> None:
    given = {"a": torch.randn(K, M) if transpose_a else torch.randn(M, K)}
    given["b"] = torch.randn(N, K) if transpose_b else torch.randn(K, N)
    if bias:
        given["c"] = torch.randn(N)
    source = text(transpose_a, transpose_b, bias)
    (expected,) = run(model(source), given)
    made = model(source)
    LargeGemm().apply(made)
    session = Session(made, list(given), ["y"], SessionOptions(2, kernels=KERNELS))
    for _ in range(3):
        (actual,) = session.run(list(given.values()))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
