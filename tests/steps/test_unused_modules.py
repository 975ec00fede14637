"""Modules that are called for what they write into their buffers: their results are unused, and no gradient passes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lit_ort.backend.tracing_settings import dynamo_settings
from tests.compare import backend
from tests.steps.case import Net


class Centred(nn.Module):
    """Statistics that are written with operators of their own."""

    center: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.center.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.center


class Accuracy(nn.Module):
    """A metric that counts in buffers."""

    right: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("right", torch.zeros((), dtype=torch.long))
        self.register_buffer("counts", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        labels = x.argmax(-1)
        self.right += (labels == 3).sum()
        self.counts.scatter_add_(0, labels, torch.ones_like(labels, dtype=torch.float32))
        return self.right / self.counts.sum()


class Quantized(nn.Module):
    """An observer and its fake quantization in one operator."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"on": 1, "low": torch.inf, "high": -torch.inf, "scale": 1.0}.items():
            self.register_buffer(name, torch.tensor([value]))
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int))

    def forward(self, x: Tensor) -> Tensor:
        on, low, high, scale, zero = self.buffers()
        return torch.fused_moving_avg_obs_fake_quant(x, on, on, low, high, scale, zero, 0.1, 0, 255, -1)


class Average(nn.Module):
    """The moving average of the weights of a linear layer, which its calls update."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.averaged = AveragedModel(self.layer, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for parameter in self.averaged.parameters():
            nn.init.zeros_(parameter)
        self.averaged.n_averaged.fill_(2)

    def forward(self, x: Tensor) -> Tensor:
        self.averaged.update_parameters(self.layer)
        return self.averaged(x)


def spectral() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(8, 8))


def in_sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5))


def in_a_formula() -> nn.Module:
    """A module whose result is the argument of a formula that is fused."""

    class Formula(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    return Formula()


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), (6, 8)),
    "BatchNorm1d, cumulative": (lambda: nn.BatchNorm1d(8, momentum=None), (6, 8)),
    "BatchNorm1d of sequences": (lambda: nn.BatchNorm1d(3), (6, 3, 8)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3, affine=False), (2, 3, 4, 8)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 2, 8)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (6, 3, 8)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (2, 3, 4, 8)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(3, track_running_stats=True), (2, 3, 2, 2, 8)),
    "MinMaxObserver": (MinMaxObserver, (6, 8)),
    "MovingAverageMinMaxObserver": (MovingAverageMinMaxObserver, (6, 8)),
    "PerChannelMinMaxObserver": (PerChannelMinMaxObserver, (6, 8)),
    "MovingAveragePerChannelMinMaxObserver": (MovingAveragePerChannelMinMaxObserver, (6, 8)),
    "HistogramObserver": (lambda: HistogramObserver(bins=16), (6, 8)),
    "FakeQuantize": (FakeQuantize, (6, 8)),
    "fused_moving_avg_obs_fake_quant": (Quantized, (6, 8)),
    "spectral_norm": (spectral, (6, 8)),
    "AveragedModel": (Average, (6, 8)),
    "centre": (Centred, (6, 8)),
    "metric": (Accuracy, (6, 8)),
    "BatchNorm1d in a sequence": (in_sequence, (6, 8)),
    "BatchNorm1d in a formula": (in_a_formula, (6, 8)),
}
# Dynamo runs modules of torch.ao in eager, and modules of torch.nn with a graph break.
SKIPPED = {name for name in MODULES if name.endswith("Observer")} | {"FakeQuantize", "BatchNorm1d, cumulative"}


def unused(m: Any, x: Tensor) -> Tensor:
    m.part(x)
    return m.first(x).square().mean()


def under_no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.part(x)
    return m.first(x).square().mean()


def returns_none(m: Any, x: Tensor) -> None:
    m.part(x)


def of_hidden_values(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    m.part(hidden)
    return hidden.square().mean()


FORMS = (unused, under_no_grad, returns_none, of_hidden_values)
SAMPLE = ("BatchNorm1d", "InstanceNorm2d", "BatchNorm1d in a formula")

CASES = [
    *itertools.product(SAMPLE, FORMS),
    *(
        pytest.param(name, form, marks=pytest.mark.slow if form is unused else pytest.mark.sweep)
        for name, form in itertools.product(sorted(MODULES.keys() - SAMPLE), FORMS)
    ),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_buffers_are_those_of_eager(name: str, form: Callable[..., Any]) -> None:
    make, shape = MODULES[name]
    module = Net(form, part=make())
    twin, engine = copy.deepcopy(module), backend(fallback="warn")
    batches = [torch.randn(shape) + 1 for _ in range(2)]
    compiled = torch.compile(module, backend=engine)
    with dynamo_settings("step", strict=True):
        for step in (compiled, twin):
            for batch in batches:
                loss = step(batch)
                if loss is not None:
                    loss.backward()
    assert [graph.fallback for graph in engine.compile_log.graphs] == [None] * len(engine.compile_log.graphs)
    assert engine.compile_log.graphs or name in SKIPPED
    expected = twin.state_dict()
    assert any(not torch.equal(expected[key], value) for key, value in Net(form, part=make()).state_dict().items())
    for key, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=lambda text, k=key: f"{k}: {text}")
