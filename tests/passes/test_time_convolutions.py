"""Convolutions over time as those of images of one row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from tests.backend.test_bf16 import assert_as_close_as_autocast, autocast
from tests.compare import assert_same_call, assert_same_step, backend
from tests.lower.test_native_phases import any_number_of_operators, assert_native
from tests.passes.reports import report_of
from tests.passes.test_image_convolutions import on_openmp

pytestmark = pytest.mark.usefixtures(any_number_of_operators.__name__, on_openmp.__name__)
CHANNELS, STEPS = 16, 40
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Conv1d(CHANNELS, 24, 3, padding=1),
    "strides": lambda: nn.Conv1d(CHANNELS, 32, 5, stride=2, bias=False),
    "groups": lambda: nn.Conv1d(CHANNELS, 32, 8, padding=4, groups=2),
    "depthwise and causal": lambda: nn.Conv1d(CHANNELS, CHANNELS, 4, padding=3, groups=CHANNELS),
    "dilated": lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=8, dilation=8, groups=CHANNELS),
    "transposed": lambda: nn.ConvTranspose1d(CHANNELS, 8, 4, stride=2, padding=1, output_padding=1),
    "one step": lambda: nn.Conv1d(CHANNELS, 24, 1),
    "patches": lambda: nn.Conv1d(CHANNELS, 24, 4, stride=4),
}


def net(layer: nn.Module) -> nn.Module:
    """A layer whose input has a gradient."""
    return nn.Sequential(nn.Conv1d(CHANNELS, CHANNELS, 3, bias=False), nn.BatchNorm1d(CHANNELS), nn.ReLU(), layer)


def step(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).tanh().square().mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAYERS)
def test_a_session_computes_them(name: str) -> None:
    engine = assert_same_step(net(LAYERS[name]()), step, torch.randn(3, CHANNELS, STEPS), tolerance=2e-5)
    assert_native(engine)


def test_each_is_an_image() -> None:
    engine = assert_same_step(net(LAYERS["groups"]()), step, torch.randn(3, CHANNELS, STEPS), tolerance=2e-5)
    assert report_of(engine, "time_convolutions").fired >= 2
    (graph,) = engine.compile_log.graphs
    assert graph.operators_after["ImageConvolution"] >= 3


def test_other_lengths_and_batches() -> None:
    """One graph for all sizes."""
    module, engine = net(LAYERS["groups"]()), backend()
    call = torch.compile(step, backend=engine, dynamic=True)
    for batch, steps in ((3, 40), (2, 33), (5, 64), (3, 40)):
        assert_same_call(module, step, call, torch.randn(batch, CHANNELS, steps))
    (graph,) = engine.compile_log.graphs
    assert graph.fallback is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYERS)
def test_autocast(name: str) -> None:
    if not has_bfloat16_matmuls():
        pytest.skip("torch's convolutions are faster here")
    module, engine, mixed = net(LAYERS[name]()), backend(), autocast(step)
    compiled = torch.compile(mixed, backend=engine)
    assert_as_close_as_autocast(module, compiled, mixed, step, torch.randn(3, CHANNELS, STEPS))
