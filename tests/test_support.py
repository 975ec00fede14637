"""Every operator on the support list against eager; and what is not on it is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_ort.compiler.passes import optional_names
from lit_ort.compiler.support import SUPPORTED
from lit_ort.errors import CompileError
from tests.compare import backend, compiled

Function = Callable[[Tensor, Tensor], Tensor]
INDEX = torch.tensor([[0, 2], [1, 1], [2, 0]])

# operator -> functions of a[3, 4] > 0 and b[3, 4], whose graphs have it on the way of a gradient
CASES: dict[str, list[Function]] = {
    "Add": [lambda a, b: a + b, lambda a, b: a + b[0], lambda a, b: a[:, :1] + b, lambda a, b: a + 2.0],
    "Sub": [lambda a, b: a - b, lambda a, b: a[0] - b, lambda a, b: 1 - a],
    "Mul": [
        lambda a, b: a * b,
        lambda a, b: a * b[:1],
        lambda a, b: a[:, :1] * b,
        lambda a, b: a * 3.0,
        lambda a, b: a * a,
    ],
    "Div": [lambda a, b: b / a, lambda a, b: b / a[:1], lambda a, b: a / 3.0],
    "Neg": [lambda a, b: -a],
    "Abs": [lambda a, b: b.abs()],
    "Exp": [lambda a, b: b.exp()],
    "Log": [lambda a, b: a.log()],
    "Pow": [lambda a, b: a**2, lambda a, b: b**3, lambda a, b: a**0.5],
    "Reciprocal": [lambda a, b: a.reciprocal()],
    "Erf": [lambda a, b: b.erf()],
    "Sin": [lambda a, b: b.sin()],
    "Cos": [lambda a, b: b.cos()],
    "Tanh": [lambda a, b: b.tanh()],
    "Sigmoid": [lambda a, b: b.sigmoid(), lambda a, b: F.silu(b)],
    "Relu": [lambda a, b: b.relu()],
    "LeakyRelu": [lambda a, b: F.leaky_relu(b, 0.2)],
    "Gelu": [lambda a, b: F.gelu(b)],
    "MatMul": [
        lambda a, b: a @ b.T,
        lambda a, b: torch.stack([a, b]) @ torch.stack([b.T, a.T]),
        lambda a, b: torch.stack([a, b]) @ b.T,
    ],
    "Gemm": [lambda a, b: F.linear(a, b, a[:, 0]), lambda a, b: torch.addmm(a[:, :3], a, b.T, beta=0.5, alpha=2.0)],
    "Reshape": [lambda a, b: a.reshape(4, 3) * b.reshape(4, 3), lambda a, b: a.flatten() * b.view(-1)],
    "Transpose": [lambda a, b: a.T * b.T, lambda a, b: a.reshape(1, 3, 4).permute(2, 0, 1)],
    "Squeeze": [lambda a, b: a.reshape(3, 1, 4).squeeze(1) * b],
    "Unsqueeze": [lambda a, b: a.unsqueeze(1) * b.unsqueeze(0)],
    "Expand": [lambda a, b: a[:, None].expand(3, 5, 4) * 2, lambda a, b: a[:1].expand(3, 4) * b],
    "Slice": [lambda a, b: a[1:, ::2], lambda a, b: a[:, 1:3] * b[:, :2]],
    "Tile": [lambda a, b: a.repeat(2, 3), lambda a, b: b.repeat(2, 1, 1)],
    "Split": [lambda a, b: torch.cat([p * k for k, p in enumerate(a.split([1, 3], 1), 1)], 1)],
    "Concat": [lambda a, b: torch.cat([a, b, a], 1), lambda a, b: torch.stack([a, b], 1)],
    "Gather": [lambda a, b: a[INDEX[:, 0]], lambda a, b: F.embedding(INDEX, a), lambda a, b: a.select(1, 2) * b[:, 0]],
    "GatherElements": [lambda a, b: a.gather(1, INDEX), lambda a, b: b.gather(0, INDEX)],
    "GatherND": [lambda a, b: a[INDEX[:, 0], INDEX[:, 1]]],
    "ScatterElements": [lambda a, b: a.scatter(1, INDEX[:, :1], b[:, :1])],
    "Where": [lambda a, b: torch.where(b > 0, a, b), lambda a, b: b.masked_fill(b > 0, 0.0)],
    "ReduceSum": [lambda a, b: a.sum(), lambda a, b: a.sum(1), lambda a, b: a.sum((0, 1), keepdim=True) * b],
    "ReduceMean": [lambda a, b: a.mean(), lambda a, b: a.mean(0) * b, lambda a, b: a.mean(-1, keepdim=True) * b],
    "Softmax": [lambda a, b: b.softmax(-1) * a, lambda a, b: b.softmax(0) * a],
    "LogSoftmax": [lambda a, b: b.log_softmax(-1) * a, lambda a, b: b.log_softmax(0) * a],
    "LayerNormalization": [lambda a, b: F.layer_norm(b, (4,), a[0], b[0]), lambda a, b: F.layer_norm(b, (3, 4), a, a)],
    "Dropout": [lambda a, b: F.dropout(a * b, 0.0, True)],
    "Cast": [lambda a, b: a.double().float() * b],
    "SoftmaxCrossEntropyLoss": [
        lambda a, b: F.cross_entropy(b, INDEX[:, 0]),
        lambda a, b: F.cross_entropy(b, INDEX[:, 0], reduction="sum"),
        lambda a, b: F.cross_entropy(b, INDEX[:, 0], reduction="none"),
        lambda a, b: F.cross_entropy(b, INDEX[:, 0], ignore_index=1),
        lambda a, b: F.cross_entropy(b.reshape(1, 4, 3), INDEX[:, :1].T),
    ],
}


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    a = torch.rand(3, 4, generator=generator) + 0.5
    b = torch.randn(3, 4, generator=generator)
    return a.requires_grad_(), b.requires_grad_()


@pytest.mark.parametrize("operator", CASES)
def test_gradients_agree_with_eager(operator: str) -> None:
    def step(a: Tensor, b: Tensor) -> Tensor:
        # Both inputs get a gradient, whatever the functions read.
        total = (a * b).sum()
        for function in CASES[operator]:
            value = function(a, b)
            total = total + (value * torch.linspace(0.3, 1.7, value.numel()).reshape(value.shape)).sum()
        return total

    a, b = inputs()
    expected = torch.autograd.grad(step(a, b), (a, b))
    actual = torch.autograd.grad(compiled(step, disable_passes=optional_names())(a, b), (a, b))
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


UNPROVEN: dict[str, Function] = {
    "cumsum": lambda a, b: a.cumsum(0),
    "elu": lambda a, b: F.elu(b),
    # Its gradient at infinity is NaN in ONNX Runtime, 0 in torch.
    "sqrt": lambda a, b: a.sqrt() * a.rsqrt(),
    "scatter_add": lambda a, b: a.scatter_add(1, INDEX, b[:, :2]),
    "where broadcasts": lambda a, b: torch.where(b > 0, a[:1], b),
    "gelu by tanh": lambda a, b: F.gelu(b, approximate="tanh"),
    "a slice that goes backwards": lambda a, b: b.flip(1),
    "layer norm of one element": lambda a, b: F.layer_norm(b[:, :1], (1,), a[0, :1], b[0, :1]),
    "parts in float64": lambda a, b: torch.cat([p * k for k, p in enumerate(b.double().split(3, 1), 1)], 1).float(),
    "layer norm without bias": lambda a, b: F.layer_norm(b, (4,), a[0]),
    "vector product": lambda a, b: a @ b[0],
    "float64": lambda a, b: (a.double() * b.double()).sum().float(),
}


@pytest.mark.parametrize("function", [pytest.param(f, id=name) for name, f in UNPROVEN.items()])
def test_what_is_not_proven_runs_as_torchs_own(function: Function) -> None:
    a, b = inputs()

    def step(a: Tensor, b: Tensor) -> Tensor:
        value = function(a, b)
        return (a * b).sum() + (value * torch.linspace(0.3, 1.7, value.numel()).reshape(value.shape)).sum()

    engine = backend()
    actual = torch.autograd.grad(torch.compile(step, backend=engine)(a, b), (a, b))
    torch.testing.assert_close(actual, torch.autograd.grad(step(a, b), (a, b)), rtol=1e-5, atol=1e-6)
    (report,) = engine.compile_log.graphs
    assert report.kind == "fused"
    assert report.torch_operators


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy_in_all_its_forms(smoothing: float, weighted: bool, soft: bool) -> None:
    a, b = inputs()
    weight = torch.tensor([0.5, 2.0, 1.0, 0.7]) if weighted else None
    target = torch.softmax(a.detach() * 3, 1) if soft else torch.tensor([0, -100, 3])

    def step(b: Tensor) -> Tensor:
        return F.cross_entropy(b, target, weight, label_smoothing=smoothing)

    expected = torch.autograd.grad(step(b), b)[0]
    torch.testing.assert_close(compiled(step)(b), step(b))
    torch.testing.assert_close(torch.autograd.grad(compiled(step)(b), b)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding_idx", [0, -1])
@pytest.mark.parametrize("indices", [torch.tensor([0, 2, 1, 2]), torch.tensor([[0, 2], [2, 1]])])
def test_the_padding_row_of_an_embedding_gets_no_gradient(padding_idx: int, indices: Tensor) -> None:
    a, b = inputs()

    def step(a: Tensor, b: Tensor) -> Tensor:
        return (F.embedding(indices, a, padding_idx) + F.embedding(indices, b)).square().sum()

    expected = torch.autograd.grad(step(a, b), (a, b))
    assert not expected[0][padding_idx].any()
    torch.testing.assert_close(torch.autograd.grad(compiled(step)(a, b), (a, b)), expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(step)(a, b), step(a, b))


@pytest.mark.parametrize("name", ["scale_grad_by_freq", "sparse"])
def test_embeddings_with_other_gradients_are_refused(name: str) -> None:
    a, _ = inputs()
    with pytest.raises(CompileError, match=f"{name}=True"):
        compiled(lambda a: F.embedding(INDEX, a, **{name: True}).sum())(a)


def test_the_list_names_only_tested_operators() -> None:
    untested = set(SUPPORTED) - set(CASES) - {"Identity", "Flatten"}
    assert not untested


@pytest.mark.parametrize("name", ["Identity", "Flatten"])
def test_operators_that_only_rewrites_make(name: str) -> None:
    import onnx_ir as ir

    from lit_ort.compiler.gradient import fused_gradient
    from lit_ort.compiler.signature import GraphOutput, StepSignature
    from lit_ort.runtime.session import Session, SessionOptions

    body = f"y = {name}(x)  z = Mul(y, x)  loss = ReduceSum<keepdims=0>(z)"
    model = ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[3, 4] x) => (float loss) {{ {body} }}'
    )
    signature = StepSignature(("x",), (0,), (GraphOutput("result", 0, True),), (True,))
    training = fused_gradient(model, signature)
    x = torch.randn(3, 4)
    loss, gradient = Session(training.model, ["x"], ["loss", "x_grad"], SessionOptions(1)).run([x])
    torch.testing.assert_close(gradient, x * 2)
    torch.testing.assert_close(loss, (x * x).sum())


def test_the_message_names_operator_place_and_remedy() -> None:
    a, _ = inputs()
    with pytest.raises(CompileError) as caught:
        torch.compile(lambda a: torch.fft.rfft(a).abs().sum(), backend=backend())(a)
    message = str(caught.value)
    assert "aten.fft_rfft" in message
    assert "test_support.py" in message
    assert "torch.compiler.disable" in message
