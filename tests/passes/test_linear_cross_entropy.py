from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lit_ort.compiler.passes.linear_cross_entropy import LinearCrossEntropy
from lit_ort.errors import SessionError
from tests.compare import backend, relative_error
from tests.passes.models import model, operators, run

ROWS, CLASSES = 300, 500


def text(
    loss: str = 'reduction = "mean", ignore_index = 3',
    layer: str = "transB = 1",
    rows: int = ROWS,
    weighted: bool = False,
    bias: bool = True,
    outputs: str = "loss",
) -> str:
    extra = (f", float[{CLASSES}] b" if bias else "") + (f", float[{CLASSES}] c" if weighted else "")
    return f"""g (float[{rows}, 16] h, float[{CLASSES}, 16] w, int64[{rows}] y{extra}) => ({outputs})
        <int64[3] deep = {{2, -1, {CLASSES}}}, int64[2] flat = {{-1, {CLASSES}}}> {{
        s = Gemm<{layer}>(h, w{", b" if bias else ""})
        d = Reshape(s, deep)
        f = Reshape(d, flat)
        loss = SoftmaxCrossEntropyLoss<{loss}>(f, y{", c" if weighted else ""})
    }}"""


def inputs(weighted: bool = False, bias: bool = True) -> dict[str, torch.Tensor]:
    given = {"h": torch.randn(ROWS, 16), "w": torch.randn(CLASSES, 16), "y": torch.randint(10, (ROWS,))}
    given |= {"b": torch.randn(CLASSES)} if bias else {}
    return given | ({"c": torch.rand(CLASSES)} if weighted else {})


def test_fires() -> None:
    made = model(text())
    assert LinearCrossEntropy().apply(made).fired == 1
    assert operators(made) == {"ATen", "Constant"}
    (node,) = (node for node in made.graph if node.op_type == "ATen")
    assert [list(value.shape or ()) for value in node.outputs] == [[], [ROWS, 16], [CLASSES, 16], [CLASSES]]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (text(rows=200), "200 x 500 scores are fewer"),
        (text(loss='reduction = "none"'), "not reduced"),
        (text(layer="transB = 1, alpha = 2.0"), "no plain linear layer"),
        (text(outputs="loss, d"), "d is read elsewhere"),
        (text(outputs="loss, s"), "s is read elsewhere"),
        (text().replace("s = Gemm<transB = 1>(h, w, b)", "t = Gemm<transB = 1>(h, w, b) s = Relu(t)"), "from Relu"),
    ],
)
def test_must_not_fire(source: str, reason: str) -> None:
    made = model(source)
    report = LinearCrossEntropy().apply(made)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert "SoftmaxCrossEntropyLoss" in operators(made)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_same_numbers(reduction: str, weighted: bool, bias: bool) -> None:
    given = inputs(weighted, bias)
    source = text(f'reduction = "{reduction}", ignore_index = 3', weighted=weighted, bias=bias)
    (expected,) = run(model(source), given)
    made = model(source)
    LinearCrossEntropy().apply(made)
    (actual,) = run(made, given)
    torch.testing.assert_close(actual, expected)


def loss_of(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(h * 2, w, b), y) * 0.25 + (w**2).mean()


@pytest.mark.parametrize("frozen", ["", "h", "w", "b"])
def test_gradients_are_those_of_eager(frozen: str) -> None:
    given = inputs()
    y = given.pop("y")
    for name, tensor in given.items():
        tensor.requires_grad_(name != frozen)
    leaves = [tensor for tensor in given.values() if tensor.requires_grad]
    ordered = (given["h"], given["w"], given["b"], y)
    expected = torch.autograd.grad(loss_of(*ordered), leaves)
    engine = backend()
    actual = torch.autograd.grad(torch.compile(loss_of, backend=engine)(*ordered), leaves)
    for found, reference in zip(actual, expected, strict=True):
        assert relative_error(found, reference) < 1e-5
    fired = {report.name: report.fired for report in engine.compile_log.graphs[0].passes}
    assert fired["linear_cross_entropy"] == 1
    assert fired["unread_gradients"] == bool(frozen)


def test_a_label_out_of_range_is_named() -> None:
    given = inputs()
    made = model(text())
    LinearCrossEntropy().apply(made)
    given["y"][5] = CLASSES
    with pytest.raises(SessionError, match=f"label {CLASSES} is out of range"):
        run(made, given)
