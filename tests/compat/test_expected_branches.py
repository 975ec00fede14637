"""Steps that branch on whether values are finite: one graph, and eager's results whatever they are."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_ort.backend.tracing_settings import dynamo_settings
from tests.compare import backend, mostly
from tests.compat.canary import canary

BATCHES = [torch.rand(3, 4), torch.full((3, 4), torch.nan), torch.rand(3, 4) * 2, torch.full((3, 4), torch.inf)]


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), list[str]()

    def skipped(self, x: Tensor) -> Tensor | None:
        loss = self.net(x).square().mean()
        if torch.isnan(loss) or loss.isinf():
            return None
        return loss

    def replaced(self, x: Tensor, *rest: float, scale: float = 1.0, **options: float) -> Tensor:
        hidden = self.net(x * scale)
        if not torch.isfinite(hidden).all():
            hidden = self.net.weight + 3
            self.calls.append("not finite")
        else:
            self.calls.append("finite")
        return hidden.sum() * sum(rest, options.get("factor", 1.0))

    def negated(self, x: Tensor) -> Tensor:
        loss, weight = self.net(x).sum(), self.net.weight
        if (~torch.isfinite(loss)).any():
            return weight.sum()
        return (lambda: loss * weight.mean() * x[0, 0])()

    def caught(self, x: Tensor) -> Tensor:
        loss = self.net(x).sum()
        try:
            if torch.isnan(loss):
                raise ValueError("not a number")
        except ValueError:
            return self.net.weight.sum()
        return loss

    def with_hook(self, x: Tensor) -> Tensor:
        self.net.bias.register_hook(lambda gradient: gradient * 2)
        loss = self.net(x).square().mean()
        return self.net.bias.sum() if torch.isnan(loss) else loss

    def with_statistics(self, x: Tensor) -> Tensor:
        loss = self.norm(self.net(x)).square().mean()
        if torch.isnan(loss):
            return self.net.weight.sum()
        return loss + self.net(x).mean()


STEPS = [name for name in vars(Module) if not name.startswith("_")]


def call(step: Any, module: Module, name: str, x: Tensor) -> tuple[Any, ...]:
    """The result, the gradients, and everything that the step changes."""
    module.zero_grad()
    module.calls.clear()
    result = step(x, 1.0, 2.0, scale=2.0, factor=0.5) if name == "replaced" else step(x)
    if result is not None:
        result.backward()
    written = [weight.grad for weight in module.parameters()] + [buffer.clone() for buffer in module.buffers()]
    return result, list(module.calls), written


@pytest.mark.parametrize("name", mostly(pytest.mark.slow, STEPS, 2))
def test_eagers_results(name: str) -> None:
    effect = "steps that look at values for safety have more graphs"
    with canary("InstructionTranslatorBase.jump", "expected_branches", effect):
        torch.compiler.reset()
        engine, module, twin = backend(fallback="warn"), Module(), Module()
        compiled = torch.compile(getattr(module, name), backend=engine)
        for x in BATCHES:
            with dynamo_settings("step", strict=False, report=lambda *_: None, compile_log=engine.compile_log):
                actual = call(compiled, module, name, x)
            expected = call(getattr(twin, name), twin, name, x)
            assert actual[1] == expected[1]
            torch.testing.assert_close(actual[::2], expected[::2], equal_nan=True)
        # Statistics would be written twice, and hooks be set twice.
        writes = name in ("with_statistics", "with_hook")
        assert bool(engine.compile_log.breaks) is writes
        assert engine.count <= (3 if writes else 1)


def test_other_branches_end_the_graph() -> None:
    torch.compiler.reset()
    engine, module = backend(fallback="warn"), Module()

    def step(x: Tensor) -> Tensor:
        loss = module.net(x).sum()
        return loss * 2 if loss > 0 else loss

    compiled = torch.compile(step, backend=engine)
    torch.testing.assert_close(compiled(BATCHES[0]), step(BATCHES[0]))
    assert engine.compile_log.breaks


def test_a_run_that_updates_parameters_is_not_dropped() -> None:
    torch.compiler.reset()
    engine, module = backend(fallback="warn"), Module()
    engine.options = dataclasses.replace(engine.options, optimizer_in_graph=True)
    with dynamo_settings("step", strict=False, report=lambda *_: None, compile_log=engine.compile_log):
        torch.compile(module.skipped, backend=engine)(BATCHES[0])
    assert engine.compile_log.breaks


def test_an_argument_that_a_function_of_the_step_writes() -> None:
    torch.compiler.reset()

    def step(x: Tensor, scale: float) -> Tensor:
        def change() -> None:
            nonlocal scale
            scale += 1

        change()
        return x.sum() * scale if torch.isfinite(x.log().sum()) else x.sum() * scale * 2

    weight = torch.ones(2, requires_grad=True)
    compiled = torch.compile(step, backend=backend())
    for x in (torch.ones(2), torch.zeros(2), torch.ones(2) * 3):
        torch.testing.assert_close(compiled(x * weight, 1.0), step(x * weight, 1.0))


def test_the_rest_behind_a_break() -> None:
    torch.compiler.reset()
    engine, module = backend(fallback="warn"), Module()

    def step(x: Tensor) -> Tensor:
        hidden = module.net(x)
        torch._dynamo.graph_break()
        return hidden.sum() if torch.isfinite(hidden).all() else hidden.nan_to_num().sum() + x[0, 0]

    compiled = torch.compile(step, backend=engine)
    for x in BATCHES:
        torch.testing.assert_close(compiled(x), step(x), equal_nan=True)
    assert len(engine.compile_log.breaks) == 1


def test_pythons_generator_draws_once() -> None:
    torch.compiler.reset()

    def step(x: Tensor) -> Tensor:
        scale = random.uniform(0.5, 1.5)
        loss = x.log().sum() * scale
        return x.sum() * scale if torch.isnan(loss) else loss

    compiled = torch.compile(step, backend=backend(fallback="warn"))
    drawn = []
    for call_of in (step, compiled):
        random.seed(1)
        drawn.append([call_of(x).item() for x in (torch.ones(2), -torch.ones(2), torch.ones(2))] + [random.random()])
    assert drawn[0] == pytest.approx(drawn[1])
