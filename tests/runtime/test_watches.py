"""Gradients of a result from which its graph computes others: hooks, `retain_grad` and `torch.autograd.grad`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lit_ort.errors import LitOrtWarning, SessionError
from tests.compare import backend, compiled, gradients

# With the second, the value is a view of a result.
SIZES = [(3, 4), pytest.param((2, 3, 4), marks=pytest.mark.slow)]
SET_ON: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "retain_grad": lambda value, seen: value.retain_grad(),
    "a hook": lambda value, seen: value.register_hook(seen.append),
    "a hook that changes the gradient": lambda value, seen: value.register_hook(lambda gradient: 2 * gradient),
    "a hook before retain_grad": lambda value, seen: (value.register_hook(torch.neg), value.retain_grad()),
    "a hook that is removed": lambda value, seen: value.register_hook(seen.append).remove(),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the loss": lambda hidden, score: score.sum(),
    "both results": lambda hidden, score: score.sum() + hidden.square().sum(),
    "the value itself": lambda hidden, score: hidden.square().sum(),
}


def step(net: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = net[0](x)
    return hidden, net[1:](hidden)


def summed(net: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden, score = step(net, x)
    return hidden, score.square().sum()


def network(*inside: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *inside, nn.Linear(6, 1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("function", [summed, pytest.param(step, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("what", "loss"), list(itertools.product(SET_ON, LOSSES)))
def test_gradients_of_a_value_behind_the_graph(
    function: Callable[..., tuple[Tensor, Tensor]], what: str, loss: str, size: tuple[int, ...]
) -> None:
    net, engine, found = network(), backend(fallback="warn"), []
    needs_eager = "removed" not in what
    for run in (function, torch.compile(function, backend=engine)):
        own, seen = copy.deepcopy(net), []
        x = torch.linspace(-1, 1, torch.Size(size).numel()).view(size)
        hidden, score = run(own, x)
        SET_ON[what](hidden, seen)
        with nullcontext() if run is function or not needs_eager else pytest.warns(LitOrtWarning, match="retain_grad"):
            LOSSES[loss](hidden, score).backward()
        found.append((hidden.grad if "retain" in what else None, seen, gradients(own)))
    torch.testing.assert_close(found[1], found[0])
    assert (engine.compile_log.graphs[-1].kind == "eager") is needs_eager


def test_a_hook_outlives_its_tensor() -> None:
    net, seen = network(), []
    hidden, loss = torch.compile(summed, backend=backend(fallback="warn"))(net, torch.ones(3, 4))
    hidden.register_hook(seen.append)
    del hidden
    with pytest.warns(LitOrtWarning, match="a hook"):
        loss.backward()
    assert len(seen) == 1


def test_a_gradient_that_is_kept_is_differentiated_again() -> None:
    found = []
    for run in (summed, torch.compile(summed, backend=backend(fallback="warn"))):
        net = network()
        hidden, loss = run(net, torch.linspace(-1, 1, 12).view(3, 4))
        hidden.retain_grad()
        with nullcontext() if run is summed else pytest.warns(LitOrtWarning, match="create_graph=True"):
            found.append(torch.autograd.grad(loss, net[0].get_parameter("weight"), create_graph=True))
        assert hidden.grad is not None
        found[-1] += torch.autograd.grad(hidden.grad.square().sum(), net[0].get_parameter("weight"))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("net", "options", "reason"),
    [(network(nn.Dropout(0.5)), {"fallback": "warn"}, "draws random numbers"), (network(), {}, "fallback='error'")],
)
def test_the_error_where_eager_can_not_run(net: nn.Sequential, options: dict[str, str], reason: str) -> None:
    hidden, loss = compiled(summed, **options)(net, torch.ones(3, 4))
    hidden.retain_grad()
    with pytest.raises(SessionError, match=f"retain_grad.. is set on result 0.*{reason}"):
        loss.backward()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("loss", "create_graph"), list(itertools.product(LOSSES, [False, True])))
def test_gradients_with_respect_to_a_value_behind_the_graph(
    loss: str, create_graph: bool, size: tuple[int, ...]
) -> None:
    engine, found = backend(fallback="warn"), []
    for run in (summed, torch.compile(summed, backend=engine)):
        net, x = network(), torch.linspace(-1, 1, torch.Size(size).numel()).view(size)
        hidden, score = run(net, x)
        needs_eager = run is not summed and loss != "the value itself"
        with pytest.warns(LitOrtWarning, match="autograd.grad|create_graph") if needs_eager else nullcontext():
            (slope,) = torch.autograd.grad(LOSSES[loss](hidden, score), hidden, create_graph=create_graph)
        if create_graph:
            hidden.sum().backward(retain_graph=True)
            slope.square().sum().backward()
        else:
            # In stages, as a pipeline has them.
            hidden.backward(slope)
        found.append((slope.detach(), gradients(net)))
    torch.testing.assert_close(found[1], found[0])
    assert any(graph.kind == "eager" for graph in engine.compile_log.graphs) is (loss != "the value itself")


def test_a_value_that_the_loss_does_not_depend_on() -> None:
    hidden, loss = compiled(summed)(network(), torch.ones(3, 4))
    other = hidden.detach().requires_grad_().exp()
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(other.sum(), hidden)
    assert torch.autograd.grad(other.sum(), hidden, allow_unused=True) == (None,)
    assert torch.autograd.grad((2 * loss).exp(), loss)[0] == 2 * (2 * loss).exp()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabrics_checks_of_results_are_no_reason_for_eager(precision: Any) -> None:
    class TwoResults(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return step(self.net, x)

    engine, fabric = backend(), Fabric(accelerator="cpu", devices=1, precision=precision)
    module = TwoResults()
    module.compile(backend=engine)
    module = fabric.setup(module)
    _, score = module(torch.ones(3, 4))
    fabric.backward(score.sum())
    assert {graph.kind for graph in engine.compile_log.graphs} == {"split"}


def test_hooks_of_other_tensors_stay_with_autograd() -> None:
    engine, seen = backend(), []
    net, x = network(), torch.ones(3, 4, requires_grad=True)
    hidden, loss = torch.compile(summed, backend=engine)(net, x)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        hidden.detach().register_hook(seen.append)
    x.register_hook(seen.append)
    loss.register_hook(seen.append)
    (2 * hidden).register_hook(seen.append)
    loss.backward()
    assert len(seen) == 2
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused"]
