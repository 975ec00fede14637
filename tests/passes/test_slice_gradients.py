"""Gradients of slices are accumulated in one tensor: it fires, it must not fire, same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lit_ort.passes.slice_gradients import join_slice_gradients
from tests.compare import assert_same_step, backend
from tests.passes.reports import report_of

WIDTH = 8
Step = Callable[[Any, Tensor], Tensor]


def halves(m: Any, x: Tensor) -> Tensor:
    hidden = m(x).tanh()
    return (hidden[:, :4].exp() * hidden[:, 4:].sin()).sum()


def rotary(m: Any, x: Tensor) -> Tensor:
    hidden = m(x)
    rotated = torch.cat([-hidden[..., 4:], hidden[..., :4]], -1)
    return (hidden * 0.3 + rotated * 0.7).square().sum()


def strided(m: Any, x: Tensor) -> Tensor:
    hidden = m(x)
    return (hidden[:, ::2].exp() * hidden[:, 1::2]).sum() + hidden[:, 2].cos().sum() + hidden[0].sin().sum()


def overlapping(m: Any, x: Tensor) -> Tensor:
    hidden = m(x)
    return (hidden[:, :6].exp() * hidden[:, 2:].sin()).sum() + hidden[:, -1].cos().sum()


@pytest.mark.parametrize("step", [halves, rotary, strided, overlapping])
def test_fires_with_the_same_numbers(step: Step) -> None:
    engine = assert_same_step(nn.Linear(WIDTH, WIDTH), step, torch.randn(6, WIDTH))
    assert report_of(engine, "slice_gradients").fired == 1
    targets = engine.compile_log.graphs[0].torch_operators
    # Few neighbouring elements are added in a region.
    assert not any("slice_backward" in name or "select_backward" in name for name in targets)


def one_slice(m: Any, x: Tensor) -> Tensor:
    return m(x)[:, :4].exp().sum()


def no_slice(m: Any, x: Tensor) -> Tensor:
    hidden = m(x)
    return (hidden.exp() + hidden.sin()).sum()


@pytest.mark.parametrize("step", [one_slice, no_slice])
def test_must_not_fire(step: Step) -> None:
    engine = assert_same_step(nn.Linear(WIDTH, WIDTH), step, torch.randn(6, WIDTH))
    assert report_of(engine, "slice_gradients").fired == 0


def test_dynamic_sizes() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m(x)
        half = x.shape[0] // 2
        return (hidden[:half].exp().sum() + hidden[half:].sin().sum()) + rotary(m, x)

    engine, module = backend(), nn.Linear(WIDTH, WIDTH)
    compiled = torch.compile(step, backend=engine)
    for rows in (6, 8, 10):
        x = torch.randn(rows, WIDTH)
        expected = torch.autograd.grad(step(module, x), list(module.parameters()))
        actual = torch.autograd.grad(compiled(module, x), list(module.parameters()))
        torch.testing.assert_close(actual, expected)
    assert len(engine.compile_log.graphs) == 2
    assert all(report.fallback is None for report in engine.compile_log.graphs)


def test_sums_of_a_thousand_gradients() -> None:
    shape, count = [WIDTH, WIDTH], 1200
    graph = fx.Graph()
    terms = [graph.placeholder(f"gradient_{number}") for number in range(count)]
    for term in terms:
        term.meta["val"] = torch.empty(WIDTH)
    rows = [
        graph.call_function(torch.ops.aten.select_backward.default, (term, shape, 0, row % WIDTH))
        for row, term in enumerate(terms)
    ]
    for node in rows:
        node.meta["val"] = torch.empty(shape)
    total = rows[0]
    for node in rows[1:]:
        total = graph.call_function(torch.ops.aten.add.Tensor, (total, node))
        total.meta["val"] = torch.empty(shape)
    graph.output((total,))
    module = fx.GraphModule({}, graph)
    given = torch.randn(count, WIDTH)
    (wanted,) = module(*given)
    assert join_slice_gradients(module) == 1
    module.recompile()
    torch.testing.assert_close(module(*given)[0], wanted)
