"""Convolutions over time are computed as images of one row, and results and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compare import assert_same_call, assert_same_step, backend
from tests.passes.reports import report_of

Made = Callable[[], nn.Module]
LAYERS: dict[str, Made] = {
    "plain": lambda: nn.Conv1d(16, 24, 5),
    "stride and padding": lambda: nn.Conv1d(16, 24, 4, stride=2, padding=3, bias=False),
    "dilation": lambda: nn.Conv1d(16, 24, 3, dilation=4, padding="same"),
    "groups": lambda: nn.Conv1d(16, 32, 3, groups=4),
    "depthwise": lambda: nn.Conv1d(16, 16, 4, groups=16, padding=3),
    "transposed": lambda: nn.ConvTranspose1d(16, 24, 5, stride=2, padding=1, output_padding=1),
    "as long as the stride": lambda: nn.Conv1d(16, 24, 4, stride=4),
    "several": lambda: nn.Sequential(
        nn.Conv1d(16, 24, 5, padding=2), nn.GELU(), nn.GroupNorm(4, 24), nn.Conv1d(24, 24, 3, stride=2), nn.Dropout(0.0)
    ),
}


class Steps(nn.Module):
    """Layers between others.

    Args:
        layer: of 16 channels.
        is_permuted: whether the channels of a step are adjacent.
    """

    def __init__(self, layer: nn.Module, is_permuted: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 16)
        self.layer, self.is_permuted = layer, is_permuted

    def forward(self, x: Tensor) -> Tensor:
        steps = self.first(x).transpose(1, 2)
        return self.layer(steps if self.is_permuted else steps.contiguous()).tanh()


def loss(module: Any, x: Tensor) -> Tensor:
    return module(x).square().mean()


@pytest.mark.parametrize("length", [20, 600])
@pytest.mark.parametrize("is_permuted", [False, True], ids=["steps adjacent", "channels adjacent"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_eagers(name: str, is_permuted: bool, length: int) -> None:
    torch.manual_seed(0)
    module = Steps(LAYERS[name](), is_permuted)
    # Small convolutions would be written as matmuls of their windows.
    engine = assert_same_step(module, loss, torch.randn(4, length, 3), disable_passes=("window_convolutions",))
    assert report_of(engine, "convolutions_over_time").fired == (4 if name == "several" else 2)


def test_split_graphs() -> None:
    module = Steps(LAYERS["several"](), False).eval()
    compiled = torch.compile(lambda m, x: m(x), backend=backend(disable_passes=("window_convolutions",)))
    x, found = torch.randn(4, 600, 3), []
    for call in (module, lambda x: compiled(module, x)):
        result = call(x)
        found.append([result, *torch.autograd.grad(result, list(module.parameters()), torch.ones_like(result))])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_other_lengths() -> None:
    module, engine = Steps(LAYERS["several"](), False).eval(), backend(disable_passes=("window_convolutions",))
    step = torch.compile(loss, backend=engine)
    for length in (40, 50, 60):
        assert_same_call(module, loss, step, torch.randn(4, length, 3))
    assert all(graph.fallback is None for graph in engine.compile_log.graphs)
