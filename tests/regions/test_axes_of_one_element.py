"""Reductions of values that have axes of one element, of few and of many elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.compare import backend, relative_error

# More elements than a row that one thread sums.
MANY = ((1024, 12, 1), (1, 5000), (5000, 1), (1200, 1, 4, 1), (2, 1, 3000), (1, 1, 6000))
FEW = ((5, 3, 1), (1, 4), (4, 1), (2, 1, 3, 1))

REDUCTIONS: dict[str, Callable[[Tensor, tuple[int, ...], bool], Tensor]] = {
    "sum": lambda x, axes, keep: x.sum(axes, keep),
    "mean": lambda x, axes, keep: x.mean(axes, keep),
    "amax": lambda x, axes, keep: x.amax(axes, keep),
    "var": lambda x, axes, keep: x.var(axes, keepdim=keep, correction=0),
    "logsumexp": lambda x, axes, keep: x.logsumexp(axes, keep),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted mean": lambda x, y: ((x - y).abs() * (y != 0)).sum() / (y != 0).sum(),
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth l1": functional.smooth_l1_loss,
    "bce": lambda x, y: functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "gaussian": lambda x, y: functional.gaussian_nll_loss(x, y, y.exp()),
    "poisson": lambda x, y: functional.poisson_nll_loss(x, y.exp()),
    "sums": lambda x, y: functional.mse_loss(x, y, reduction="sum"),
}


def assert_right(step: Callable[..., Tensor], *inputs: Tensor) -> None:
    inputs = tuple(x.requires_grad_() for x in inputs)
    actual, expected = torch.compile(step, backend=backend())(*inputs), step(*inputs)
    assert actual.shape == expected.shape
    assert relative_error(actual.detach(), expected.detach()) < 1e-5
    weights = torch.linspace(0.5, 1.5, expected.numel()).reshape(expected.shape)
    pairs = (torch.autograd.grad(value, inputs, weights, allow_unused=True) for value in (actual, expected))
    for gradient, reference in zip(*pairs, strict=True):
        # Some are zero up to rounding, where a value is its own mean.
        assert (gradient is None) == (reference is None)
        if gradient is not None and reference is not None:
            torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5 * float(reference.abs().max()) + 1e-6)


def all_axes(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], bool]]:
    numbers = range(len(shape))
    axes = itertools.chain.from_iterable(itertools.combinations(numbers, k) for k in range(1, len(shape) + 1))
    return itertools.product(axes, (False, True))


@pytest.mark.parametrize("shape", MANY, ids=str)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.sampled(12)
def test_losses(name: str, shape: tuple[int, ...]) -> None:
    assert_right(LOSSES[name], torch.randn(shape), torch.randn(shape))


@pytest.mark.parametrize("name", ["sum", "var"])
def test_reductions_over_everything(name: str) -> None:
    for shape in (*MANY, *FEW):
        axes = tuple(range(len(shape)))
        assert_right(lambda x, axes=axes: REDUCTIONS[name](x.tanh() * x, axes, False), torch.randn(shape))


@pytest.mark.sweep
@pytest.mark.parametrize("shape", [*MANY, *FEW], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_over_all_axes(name: str, shape: tuple[int, ...]) -> None:
    for axes, keep in all_axes(shape):
        assert_right(lambda x, axes=axes, keep=keep: REDUCTIONS[name](x.tanh() * x, axes, keep), torch.randn(shape))


@pytest.mark.sweep
@pytest.mark.parametrize("shape", [*MANY, *FEW], ids=str)
def test_rows(shape: tuple[int, ...]) -> None:
    for axis in range(len(shape)):
        assert_right(lambda x, axis=axis: (x.tanh() * 2).softmax(axis) * x, torch.randn(shape))
        assert_right(lambda x, axis=axis: (x.tanh() * 2).cumsum(axis), torch.randn(shape))


def test_the_loss_of_a_regression_with_one_output() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x, y = torch.randn(6000, 8), torch.randn(6000, 1)
    expected = functional.mse_loss(module(x), y)
    step = torch.compile(lambda x, y: functional.mse_loss(module(x), y), backend=backend())
    assert relative_error(step(x, y).detach(), expected.detach()) < 1e-5
