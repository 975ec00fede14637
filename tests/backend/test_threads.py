"""Threads that compile and train at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lit_ort
from tests.compare import backend
from tests.lightning_models import assert_same_weights, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning")


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[Any], None], arguments: Sequence[Any]) -> None:
    """Calls a function once for each argument, in as many threads, and raises the first error."""
    errors: list[BaseException] = []

    def call(argument: Any) -> None:
        try:
            work(argument)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def gradient(step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(step(x).square().mean(), x)[0]


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.sweep)])
def test_threads_compile_functions_of_their_own(rounds: int) -> None:
    for _ in range(rounds):
        torch.compiler.reset()
        nets = [nn.Sequential(nn.Linear(4, 8 + k), nn.Tanh(), nn.Linear(8 + k, 1)) for k in range(3)]
        engine = backend()

        def work(net: nn.Module, engine: Any = engine) -> None:
            x, step = torch.ones(5, 4), torch.compile(net, backend=engine)
            for _ in range(3):
                torch.testing.assert_close(gradient(step, x), gradient(net, x))

        in_threads(work, nets)
        assert [graph.kind for graph in engine.compile_log.graphs] == ["split"] * 3


def test_threads_share_a_function() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))
    step = torch.compile(net, backend=backend())

    def work(x: Tensor) -> None:
        for _ in range(20):
            torch.testing.assert_close(gradient(step, x), gradient(net, x), rtol=1e-4, atol=1e-6)

    in_threads(work, [torch.randn(8, 16) for _ in range(3)])


class Layers(LightningModule):
    """Has layers for which torch is changed while Dynamo traces them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, width, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 16, 0.0, batch_first=True)
        self.resize = nn.Upsample(scale_factor=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.resize(self.encoder(self.recurrent(batch)[0])).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.sweep)])
def test_threads_train(rounds: int) -> None:
    widths, data = (6, 8), DataLoader(torch.randn(20, 5, 4), 4)  # pyright: ignore[reportArgumentType]
    for _ in range(rounds):
        torch.compiler.reset()
        torch.manual_seed(0)
        modules = {width: Layers(width) for width in widths}
        twins = {width: Layers(width) for width in widths}
        for width in widths:
            twins[width].load_state_dict(modules[width].state_dict())
            trainer("auto").fit(twins[width], data)

        def work(width: int, modules: dict[int, Layers] = modules, twins: dict[int, Layers] = twins) -> None:
            runner = trainer(lit_ort.ORTStrategy(fallback="error"))
            runner.fit(modules[width], data)
            assert_same_weights(modules[width], twins[width])
            assert [graph.kind for graph in lit_ort.explain(runner).graphs] == ["fused"]

        in_threads(work, widths)
