"""The dropout fusion, whose masks are a function of the run's seed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compare import backend
from tests.passes.reports import report_of

NAME, TARGET = "dropout", "lit_ort.dropout.default"


@pytest.mark.parametrize(("probability", "operators"), [(0.3, 1), (0.0, 0)])
def test_fires(probability: float, operators: int) -> None:
    engine = backend(disable_passes=("regions",))
    x = torch.randn(40, 50, requires_grad=True)
    torch.compile(lambda x: F.dropout(x, probability, True).exp().sum(), backend=engine)(x).backward()
    assert report_of(engine, NAME).fired == operators
    targets = engine.compile_log.graphs[0].torch_operators
    assert targets.get(TARGET, 0) == operators
    assert not [target for target in targets if "bernoulli" in target]


def test_a_graph_without_inputs() -> None:
    engine = backend()
    step = torch.compile(lambda: F.dropout(torch.ones(1000), 0.5, True), backend=engine)
    first, second = step(), step()
    assert report_of(engine, NAME).fired == 1
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(first, second)


def test_must_not_fire() -> None:
    engine = backend()
    x = torch.randn(40, 50, requires_grad=True)
    torch.compile(lambda x: F.alpha_dropout(x, 0.3, True).sum(), backend=engine)(x)
    assert report_of(engine, NAME).fired == 0
    assert TARGET not in engine.compile_log.graphs[0].torch_operators


def test_each_probability_is_compiled_separately() -> None:
    engine = backend()
    step = torch.compile(lambda x, p: F.dropout(x, p, True), backend=engine)
    x = torch.ones(200, 100)
    for probability in (0.1, 0.4, 0.7):
        dropped = (step(x, probability) == 0).float().mean()
        assert abs(float(dropped) - probability) < 0.02


def test_can_be_disabled() -> None:
    engine = backend(disable_passes=(NAME,))
    x = torch.ones(200, 100)
    result = torch.compile(lambda x: F.dropout(x, 0.3, True), backend=engine)(x)
    assert abs(float((result == 0).float().mean()) - 0.3) < 0.02
    assert TARGET not in engine.compile_log.graphs[0].torch_operators


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_numbers(dtype: torch.dtype) -> None:
    """Values that are not dropped are scaled by 1 / (1 - p), and so are their gradients."""
    x = (torch.rand(100, 50) + 0.5).to(dtype).requires_grad_()

    def step(x: Tensor) -> Tensor:
        return F.dropout(x, 0.25, True)

    result = torch.compile(step, backend=backend())(x)
    result.sum().backward()
    assert x.grad is not None
    mask = result != 0
    assert abs(float(mask.float().mean()) - 0.75) < 0.03
    expected = x.detach() * mask / 0.75
    torch.testing.assert_close(result.detach(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)
    torch.testing.assert_close(x.grad.float(), mask / 0.75, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)
