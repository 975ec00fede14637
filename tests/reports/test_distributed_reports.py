"""Public reports of data-parallel training, as programs of our own on two ranks over gloo on 127.0.0.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lit_ort import ORTDDPStrategy
from tests.compare import backend
from tests.ranks import run_on_ranks
from tests.reports.report import TRAINED, Compile, Module, Strategy, assert_same, results_of, row, trained

# All tests of the file share one launch.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed_reports")]

RANKS = 2


def gradients_that_are_accumulated_without_synchronization(compiled: Compile[Any]) -> Any:
    """Gradients of all but the last small batch stay local; they were synchronized at the wrong one, or never.

    https://github.com/modelscope/FunASR/pull/3472 and https://github.com/karpathy/build-nanogpt/pull/30
    """
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    parallel = DistributedDataParallel(net)
    model, optimizer = compiled(parallel), torch.optim.SGD(net.parameters(), 0.1)
    for k in range(6):
        parallel.require_backward_grad_sync = k % 3 == 2
        (model(row(4, 3).cos() + k + dist.get_rank()).square().mean() / 3).backward()
        if k % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return net


def a_static_graph_with_an_unused_head(compiled: Compile[Any]) -> Any:
    """A model with two results, one of which has no part in the loss: `static_graph=True` failed in the second step.

    https://github.com/pytorch/pytorch/issues/79171
    """
    net = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)])

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = net[0](x).relu()
            return net[1](hidden), net[2](hidden).detach()

    model = compiled(DistributedDataParallel(Heads(), static_graph=True))
    other = None
    for k in range(3):
        loss, other = model(row(4, 3).cos() + dist.get_rank() + k)
        loss.square().mean().backward()
    return [None if p.grad is None or not p.grad.any() else p.grad for p in net.parameters()], other


def a_teacher_without_gradients(strategy: Strategy) -> Any:
    """A distilled model whose teacher runs under `no_grad` in the step raised an error about unfinished reductions.

    https://github.com/Lightning-AI/pytorch-lightning/issues/6087
    """
    student, teacher = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2), nn.Tanh()).requires_grad_(False)

    class Distilled(Module):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            with torch.no_grad():
                expected = teacher(batch[0]) + student(batch[0]).mean()
            return (student(batch[0]) - expected).square().mean()

    return trained([student, teacher], nn.Identity(), row(32, 4).cos(), strategy, devices=RANKS, module=Distilled)


def a_part_that_some_steps_leave_out(strategy: Strategy) -> Any:
    """`find_unused_parameters=True` on CPUs, for a part that takes no part in some of the steps.

    https://github.com/Lightning-AI/pytorch-lightning/issues/6121
    """
    body, extra = nn.Linear(4, 4), nn.Linear(4, 1)

    class Skipping(Module):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            hidden = body(batch[0]).tanh()
            return hidden.square().mean() if batch_idx % 2 else extra(hidden).square().mean()

    return trained([body, extra], nn.Identity(), row(64, 4).cos(), strategy, devices=RANKS, module=Skipping)


COMPILED = (gradients_that_are_accumulated_without_synchronization, a_static_graph_with_an_unused_head)
TRAINED_PROGRAMS = (a_teacher_without_gradients, a_part_that_some_steps_leave_out)


def run_all() -> dict[str, tuple[Any, Any]]:
    """The results of all programs through ONNX Runtime and in eager; the Trainers leave a process group."""
    results: dict[str, tuple[Any, Any]] = {}
    for program in TRAINED_PROGRAMS:
        options = {"find_unused_parameters": program is a_part_that_some_steps_leave_out}
        expected = results_of(program, lambda options=options: DDPStrategy(**options))
        actual = results_of(program, lambda options=options: ORTDDPStrategy(fallback="error", **options))
        results[program.__name__] = actual, expected
    for program in COMPILED:
        expected = results_of(program, lambda step: step)
        engine = backend()
        results[program.__name__] = results_of(program, lambda s, e=engine: torch.compile(s, backend=e)), expected
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, tuple[Any, Any]]]:
    return run_on_ranks(run_all, RANKS)


@pytest.mark.parametrize("program", [*TRAINED_PROGRAMS, *COMPILED], ids=lambda program: program.__name__)
@pytest.mark.sweep
def test_same_as_eager(program: Callable[..., Any], results: list[dict[str, tuple[Any, Any]]]) -> None:
    for of_rank in results:
        actual, expected = of_rank[program.__name__]
        assert_same(actual, expected, False, TRAINED)
