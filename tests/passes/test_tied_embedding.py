from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from lit_ort.compiler.passes.tied_embedding import TiedEmbedding
from tests.passes.models import model, operators, run

ROWS, WIDTH, TOKENS = 50, 8, 12
CALL = 'org.pytorch.aten.ATen<overload_name = "", operator = "lit_ort::'


def text(more: str = "", outputs: str = "", sum_of: str = "e, w") -> str:
    return f"""g (float[{TOKENS}, {WIDTH}] h, float[{ROWS}, {WIDTH}] t, int64[{TOKENS}] y, int64[{TOKENS}] i,
        float[{TOKENS}, {WIDTH}] g) => (float loss, float[{ROWS}, {WIDTH}] d{outputs})
        <int64[5] settings = {{-100, 1, 1, 1, 0}}> {{
        loss, dh, w, db = {CALL}linear_cross_entropy">(h, t, y, settings)
        s = Shape(t)
        e = {CALL}embedding_gradient">(s, i, g)
        {more}
        d = Sum({sum_of})
    }}"""


def made(source: str) -> ir.Model:
    result = model(source)
    for value in (value for node in result.graph for value in node.outputs):
        # ATen nodes have no inference of their own.
        value.dtype = value.dtype or ir.DataType.FLOAT
    return result


def inputs() -> dict[str, torch.Tensor]:
    return {
        "h": torch.randn(TOKENS, WIDTH),
        "t": torch.randn(ROWS, WIDTH),
        "y": torch.randint(ROWS, (TOKENS,)),
        "i": torch.randint(ROWS, (TOKENS,)),
        "g": torch.randn(TOKENS, WIDTH),
    }


@pytest.mark.parametrize("order", ["e, w", "w, e"])
def test_fires(order: str) -> None:
    graph = made(text(sum_of=order))
    assert TiedEmbedding().apply(graph).fired == 1
    assert "Sum" not in operators(graph)
    assert [value.name for value in graph.graph.outputs] == ["loss", "d", "w"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (text(sum_of="e, w, t"), "adds 3 gradients"),
        (text(sum_of="e, t"), "does not come from an output layer"),
        (text("n = Neg(w)", f", float[{ROWS}, {WIDTH}] n"), "read elsewhere"),
    ],
)
def test_must_not_fire(source: str, reason: str) -> None:
    graph = made(source)
    report = TiedEmbedding().apply(graph)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert "Sum" in operators(graph)


def test_same_numbers() -> None:
    given = inputs()
    expected = run(made(text()), given)
    graph = made(text())
    TiedEmbedding().apply(graph)
    for actual, reference in zip(run(graph, given)[:2], expected, strict=True):
        torch.testing.assert_close(actual, reference)


def test_as_eager() -> None:
    given = inputs()
    graph = made(text())
    TiedEmbedding().apply(graph)
    actual = run(graph, given)[1]
    table = given["t"].requires_grad_()
    loss = F.cross_entropy(given["h"] @ table.T, given["y"]) + (F.embedding(given["i"], table) * given["g"]).sum()
    (expected,) = torch.autograd.grad(loss, table)
    torch.testing.assert_close(actual, expected)
