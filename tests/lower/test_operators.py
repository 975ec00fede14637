"""Operators compared with eager: results and gradients, in fused and split graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_ort.errors import CompileError
from tests.compare import backend, compiled, mostly

Function = Callable[[Tensor, Tensor], Tensor]
INDEX = torch.tensor([[0, 2], [1, 1], [2, 0]])

# By name, functions of a[3, 4] > 0 and b[3, 4].
CASES: dict[str, list[Function]] = {
    "add": [lambda a, b: a + b, lambda a, b: a + b[0], lambda a, b: a[:, :1] + b, lambda a, b: a + 2.0],
    "sub": [lambda a, b: a - b, lambda a, b: a[0] - b, lambda a, b: 1 - a],
    "mul": [
        lambda a, b: a * b,
        lambda a, b: a * b[:1],
        lambda a, b: a[:, :1] * b,
        lambda a, b: a * 3.0,
        lambda a, b: a * a,
    ],
    "div": [lambda a, b: b / a, lambda a, b: b / a[:1], lambda a, b: a / 3.0],
    "neg": [lambda a, b: -a],
    "abs": [lambda a, b: b.abs()],
    "exp": [lambda a, b: b.exp()],
    "log": [lambda a, b: a.log()],
    "pow": [lambda a, b: a**2, lambda a, b: b**3, lambda a, b: a**0.5],
    "reciprocal": [lambda a, b: a.reciprocal()],
    "erf": [lambda a, b: b.erf()],
    "sin": [lambda a, b: b.sin()],
    "cos": [lambda a, b: b.cos()],
    "tanh": [lambda a, b: b.tanh()],
    "sigmoid": [lambda a, b: b.sigmoid(), lambda a, b: F.silu(b)],
    "relu": [lambda a, b: b.relu()],
    "leaky_relu": [lambda a, b: F.leaky_relu(b, 0.2)],
    "gelu": [lambda a, b: F.gelu(b)],
    "matmul": [
        lambda a, b: a @ b.T,
        lambda a, b: torch.stack([a, b]) @ torch.stack([b.T, a.T]),
        lambda a, b: torch.stack([a, b]) @ b.T,
    ],
    "linear": [lambda a, b: F.linear(a, b, a[:, 0]), lambda a, b: torch.addmm(a[:, :3], a, b.T, beta=0.5, alpha=2.0)],
    "reshape": [lambda a, b: a.reshape(4, 3) * b.reshape(4, 3), lambda a, b: a.flatten() * b.view(-1)],
    "transpose": [lambda a, b: a.T * b.T, lambda a, b: a.reshape(1, 3, 4).permute(2, 0, 1)],
    "squeeze": [lambda a, b: a.reshape(3, 1, 4).squeeze(1) * b],
    "unsqueeze": [lambda a, b: a.unsqueeze(1) * b.unsqueeze(0)],
    "expand": [lambda a, b: a[:, None].expand(3, 5, 4) * 2, lambda a, b: a[:1].expand(3, 4) * b],
    "slice": [lambda a, b: a[1:, ::2], lambda a, b: a[:, 1:3] * b[:, :2]],
    "tile": [lambda a, b: a.repeat(2, 3), lambda a, b: b.repeat(2, 1, 1)],
    "split": [lambda a, b: torch.cat([p * k for k, p in enumerate(a.split([1, 3], 1), 1)], 1)],
    "concat": [lambda a, b: torch.cat([a, b, a], 1), lambda a, b: torch.stack([a, b], 1)],
    "index": [lambda a, b: a[INDEX[:, 0]], lambda a, b: F.embedding(INDEX, a), lambda a, b: a.select(1, 2) * b[:, 0]],
    "gather": [lambda a, b: a.gather(1, INDEX), lambda a, b: b.gather(0, INDEX)],
    "index by pairs": [lambda a, b: a[INDEX[:, 0], INDEX[:, 1]]],
    "scatter": [lambda a, b: a.scatter(1, INDEX[:, :1], b[:, :1])],
    "where": [lambda a, b: torch.where(b > 0, a, b), lambda a, b: b.masked_fill(b > 0, 0.0)],
    "sum": [lambda a, b: a.sum(), lambda a, b: a.sum(1), lambda a, b: a.sum((0, 1), keepdim=True) * b],
    "mean": [lambda a, b: a.mean(), lambda a, b: a.mean(0) * b, lambda a, b: a.mean(-1, keepdim=True) * b],
    "softmax": [lambda a, b: b.softmax(-1) * a, lambda a, b: b.softmax(0) * a],
    "log_softmax": [lambda a, b: b.log_softmax(-1) * a, lambda a, b: b.log_softmax(0) * a],
    "layer_norm": [lambda a, b: F.layer_norm(b, (4,), a[0], b[0]), lambda a, b: F.layer_norm(b, (3, 4), a, a)],
    "dropout with probability 0": [lambda a, b: F.dropout(a * b, 0.0, True)],
    "cast": [lambda a, b: a.double().float() * b],
    "cross_entropy": [
        lambda a, b: F.cross_entropy(b, INDEX[:, 0]),
        lambda a, b: F.cross_entropy(b, INDEX[:, 0], reduction="sum"),
        lambda a, b: F.cross_entropy(b, INDEX[:, 0], reduction="none"),
        lambda a, b: F.cross_entropy(b, INDEX[:, 0], ignore_index=1),
        lambda a, b: F.cross_entropy(b.reshape(1, 4, 3), INDEX[:, :1].T),
    ],
    "cumsum": [lambda a, b: a.cumsum(0)],
    "elu": [lambda a, b: F.elu(b)],
    "sqrt": [lambda a, b: a.sqrt() * a.rsqrt()],
    "scatter_add": [lambda a, b: a.scatter_add(1, INDEX, b[:, :2])],
    "where with broadcast": [lambda a, b: torch.where(b > 0, a[:1], b)],
    "gelu with tanh": [lambda a, b: F.gelu(b, approximate="tanh")],
    "flip": [lambda a, b: b.flip(1)],
    "layer norm of one element": [lambda a, b: F.layer_norm(b[:, :1], (1,), a[0, :1], b[0, :1])],
    "split in float64": [lambda a, b: torch.cat([p * k for k, p in enumerate(b.double().split(3, 1), 1)], 1).float()],
    "layer norm without bias": [lambda a, b: F.layer_norm(b, (4,), a[0])],
    "vector product": [lambda a, b: a @ b[0]],
    "float64": [lambda a, b: (a.double() * b.double()).sum().float()],
}


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    a = torch.rand(3, 4, generator=generator) + 0.5
    b = torch.randn(3, 4, generator=generator)
    return a.requires_grad_(), b.requires_grad_()


def weighted(value: Tensor) -> Tensor:
    """Gives each element a different weight, so that errors don't cancel."""
    return value * torch.linspace(0.3, 1.7, value.numel()).reshape(value.shape)


# One in twelve operators of torch's database is compared too, with its samples.
@pytest.mark.sampled(4)
@pytest.mark.parametrize("operator", mostly(pytest.mark.sweep, CASES, 4))
def test_gradients_match_eager(operator: str) -> None:
    def results(a: Tensor, b: Tensor) -> list[Tensor]:
        return [weighted(function(a, b)) for function in CASES[operator]]

    def step(a: Tensor, b: Tensor) -> Tensor:
        # Both inputs have a gradient, even if the functions read only one of them.
        return (a * b).sum() + torch.stack([value.sum() for value in results(a, b)]).sum()

    a, b = inputs()
    # In float64, since a layer norm of one element is 0 in sessions and the error of a sum in eager.
    exact = [value.detach().double().requires_grad_() for value in (a, b)]
    expected = tuple(value.float() for value in torch.autograd.grad(step(*exact), exact))
    engine, split_engine = backend(), backend()
    fused = torch.autograd.grad(torch.compile(step, backend=engine)(a, b), (a, b))
    values = torch.compile(results, backend=split_engine)(a, b)
    split = torch.autograd.grad([*values, (a * b).sum()], (a, b), [*map(torch.ones_like, values), torch.ones(())])
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused"]
    for gradients in (fused, split):
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)
    for value, reference in zip(values, results(a, b), strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_all_forms_of_cross_entropy(smoothing: float, weighted: bool, soft: bool) -> None:
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
def test_the_padding_row_of_an_embedding_has_no_gradient(padding_idx: int, indices: Tensor) -> None:
    a, b = inputs()

    def step(a: Tensor, b: Tensor) -> Tensor:
        return (F.embedding(indices, a, padding_idx) + F.embedding(indices, b)).square().sum()

    expected = torch.autograd.grad(step(a, b), (a, b))
    assert not expected[0][padding_idx].any()
    torch.testing.assert_close(torch.autograd.grad(compiled(step)(a, b), (a, b)), expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(step)(a, b), step(a, b))


def test_an_embedding_with_gradients_scaled_by_frequency() -> None:
    a, _ = inputs()

    def step(a: Tensor) -> Tensor:
        return F.embedding(INDEX, a, scale_grad_by_freq=True).square().sum()

    expected = torch.autograd.grad(step(a), a)
    torch.testing.assert_close(torch.autograd.grad(compiled(step)(a), a), expected)


def test_a_lazy_conjugate_of_which_the_trace_knows_nothing() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.ifft(x).resolve_conj()).square().sum()

    found = []
    for run in (step, compiled(step)):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        run(x).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def test_a_result_whose_dtype_sessions_do_not_support() -> None:
    with pytest.raises(CompileError, match="torch.uint64, which sessions don't support"):
        compiled(torch.hash_tensor)(torch.ones(3))


def test_a_transposed_scalar() -> None:
    x = torch.tensor(0.7)
    assert compiled(lambda x: x.transpose(0, -1) * 2)(x) == 2 * x
