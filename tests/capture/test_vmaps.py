"""Graphs with vectorized functions become graphs of operators, with fusions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan

from tests.compare import backend, relative_error
from tests.passes.reports import report_of

Step = Callable[[Tensor, Tensor], Tensor]


def rows(x: Tensor, y: Tensor) -> Tensor:
    return torch.vmap(lambda a, b: (a * b + a.sum()).exp(), in_dims=(0, 1))(x.sin(), y).sum()


def nested(x: Tensor, y: Tensor) -> Tensor:
    outer = torch.vmap(lambda a: torch.vmap(lambda b: (a * b).sum())(y.t()))(x)
    return outer.square().mean()


def with_constants(x: Tensor, y: Tensor) -> Tensor:
    return torch.vmap(lambda a: a * torch.tensor([1.0, 2.0, 3.0, 4.0]))(x).sum() + y.sum()


def two_regions(x: Tensor, y: Tensor) -> Tensor:
    first = torch.vmap(torch.dot, in_dims=(0, 1))(x, y)
    return torch.vmap(torch.outer)(first[:, None], x).exp().sum()


def layers(x: Tensor, y: Tensor) -> Tensor:
    return torch.vmap(lambda a: F.layer_norm(a, (4,)) @ y)(x).tanh().sum()


def scanned(x: Tensor, y: Tensor) -> Tensor:
    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return associative_scan(combine, (x.sigmoid(), y.t()), dim=0, combine_mode="generic")[1].square().sum()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", [rows, nested, with_constants, two_regions, layers, scanned])
def test_gradients_match_eager_and_fusions_fire(step: Step) -> None:
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    engine = backend()

    def with_dropout(x: Tensor, y: Tensor) -> Tensor:
        return step(x, y) + 0 * F.dropout(x, 0.5).sum()

    loss = torch.compile(with_dropout, backend=engine)(x, y)
    expected = step(x, y)
    assert relative_error(loss.detach(), expected.detach()) < 1e-6
    pairs = zip(torch.autograd.grad(loss, (x, y)), torch.autograd.grad(expected, (x, y)), strict=True)
    assert all(relative_error(gradient, reference) < 1e-5 for gradient, reference in pairs)
    # A graph with functorch's levels has no fusions.
    assert report_of(engine, "dropout").fired == 1


def test_a_region_that_changes_grad_mode_is_not_inlined() -> None:
    def step(x: Tensor) -> Tensor:
        def scaled(a: Tensor) -> Tensor:
            with torch.no_grad():
                scale = a.norm()
            return a * scale

        return torch.vmap(scaled)(x).sum()

    x = torch.randn(3, 4, requires_grad=True)
    loss = torch.compile(step, backend=backend())(x)
    (actual,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(step(x), x)
    assert relative_error(actual, expected) < 1e-6


def test_functional_gradients_inside_a_graph_are_not_inlined() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.func.grad(lambda a: a.square().sum())(x).exp().sum()

    x = torch.randn(3, 4, requires_grad=True)
    loss = torch.compile(step, backend=backend())(x)
    (actual,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(actual, 2 * (2 * x).exp().detach())
