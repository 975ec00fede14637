"""Gradients that are passed to the optimizer inside a run: it fires, it must not fire, same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import lit_ort
from lit_ort.joint.phases import PhaseGraph, one_phase
from lit_ort.ops.hand_over import hand_over
from lit_ort.options import ORTOptions
from lit_ort.passes.optimizer_updates import NAME, hand_over_gradients
from lit_ort.passes.owners import memory_owner
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.parameter_updates import Clipping, Updates
from tests.joint.traced import Function, joint_of
from tests.passes.reports import report_of


def one_run(function: Function, *inputs: Tensor) -> tuple[PhaseGraph, list[fx.Node]]:
    """A fused phase, and the inputs of its gradients."""
    joint = joint_of(function, *inputs)
    phase = one_phase(joint, 0, None, recomputes=False)
    placeholders = [node for node in phase.module.graph.nodes if node.op == "placeholder"]
    return phase, [placeholders[position] for position in joint.gradients]


def returned_by(phase: PhaseGraph) -> list[fx.Node]:
    returned = next(reversed(phase.module.graph.nodes)).args[0]
    assert isinstance(returned, tuple)
    return [node for node in returned if isinstance(node, fx.Node)]


def two_weights(v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (((v @ w).tanh() @ w.t()).square().mean(),)


def weights() -> list[Tensor]:
    return [torch.randn(6, 6).requires_grad_() for _ in range(2)]


def test_each_gradient_is_passed_after_the_last_reader_of_its_parameter() -> None:
    phase, parameters = one_run(two_weights, *weights())
    assert hand_over_gradients(phase.module, phase.results, parameters) == 2
    phase.module.graph.lint()
    nodes = list(phase.module.graph.nodes)
    calls = [node for node in nodes if node.target is hand_over]
    returned = returned_by(phase)[1:]
    assert set(returned) == set(calls)
    for call, parameter in zip(returned, parameters, strict=True):
        assert call.args[1] is parameter
        readers = [
            node
            for node in nodes
            if node is not call and any(memory_owner(a) is parameter for a in node.all_input_nodes)
        ]
        assert readers
        assert all(nodes.index(reader) < nodes.index(call) for reader in readers)


def test_results_are_unchanged() -> None:
    phase, parameters = one_run(two_weights, *weights())
    before, *_ = returned_by(phase)
    hand_over_gradients(phase.module, phase.results, parameters)
    after, *gradients = returned_by(phase)
    assert after is before
    assert {node.target for node in gradients} == {hand_over}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def fused(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def rows(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square()


def engine_of(updates: Updates | None) -> lit_ort.ORTBackend:
    options = ORTOptions(fallback="error", optimizer_in_graph=updates is not None)
    return lit_ort.ORTBackend(options, updates=updates)


def test_fires_once_for_each_parameter() -> None:
    engine = engine_of(Updates(BufferPool()))
    torch.compile(fused, backend=engine)(net(), torch.randn(5, 6)).backward()
    assert report_of(engine, NAME).fired == 4
    assert engine.compile_log.graphs[0].torch_operators["lit_ort.hand_over.default"] == 4


@pytest.mark.parametrize(
    ("step", "gradients", "in_graph"), [(fused, True, False), (rows, True, True), (fused, False, True)]
)
def test_must_not_fire(step: Callable[..., Tensor], gradients: bool, in_graph: bool) -> None:
    """Without the option, in a split step, in evaluation."""
    engine = engine_of(Updates(BufferPool()) if in_graph else None)
    with torch.set_grad_enabled(gradients):
        torch.compile(step, backend=engine)(net(), torch.randn(5, 6))
    (graph,) = engine.compile_log.graphs
    assert NAME not in {report.name for report in graph.passes}
    assert "lit_ort.hand_over.default" not in graph.torch_operators


def test_same_numbers() -> None:
    module, updates, x = net(), Updates(BufferPool()), torch.randn(5, 6)
    twin = copy.deepcopy(module)
    compiled = torch.compile(fused, backend=engine_of(updates))
    optimizer, eager_optimizer = (torch.optim.AdamW(model.parameters(), 1e-2) for model in (module, twin))
    for _ in range(4):
        with updates.step(optimizer, Clipping()) as step:
            compiled(module, x).backward()
        assert step.updated
        assert all(parameter.grad is None for parameter in module.parameters())
        fused(twin, x).backward()
        eager_optimizer.step()
        eager_optimizer.zero_grad()
    for parameter, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
