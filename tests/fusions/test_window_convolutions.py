"""Small convolutions as matmuls of their windows: where they fire, and values, gradients and strides of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lit_ort.fusions import fuse_window_convolutions as fusion
from tests.compare import backend
from tests.fusions.convolutions import Step, assert_declines, assert_fires, declined

WIDTH = 6


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv1d(WIDTH, 10, 3)
        self.narrow = nn.Conv1d(10, WIDTH, 2, bias=False)
        self.padded = nn.Conv1d(WIDTH, 10, 3, padding=2)
        self.same = nn.Conv1d(WIDTH, WIDTH, 4, padding="same", dilation=2)
        self.dilated = nn.Conv1d(WIDTH, 10, 3, dilation=2, padding=2)
        self.strided = nn.Conv1d(WIDTH, 10, 3, stride=2, dilation=2)
        self.normed = weight_norm(nn.Conv1d(WIDTH, 10, 3))
        self.grouped = nn.Conv1d(WIDTH, 10, 3, groups=2)
        self.of_one = nn.Conv1d(WIDTH, 10, 1)


def causal(m: Any, x: Tensor) -> Tensor:
    """Two layers that read no later steps, with a residual, as in temporal convolutional networks."""
    hidden = m.plain(F.pad(x.mT, (2, 0))).relu()
    return (x.mT + m.narrow(F.pad(hidden, (1, 0)))).tanh()


FIRED: dict[str, tuple[Step, int]] = {
    "one": (lambda m, x: m.plain(x.mT).square().mean(), 1),
    "contiguous": (lambda m, x: m.plain(x.reshape(4, WIDTH, 9)).square().mean(), 1),
    "causal layers": (lambda m, x: causal(m, x).square().mean(), 2),
    "padding": (lambda m, x: m.padded(x.mT).square().mean(), 1),
    "the same padding": (lambda m, x: m.same(x.mT).square().mean(), 1),
    "dilation": (lambda m, x: m.dilated(x.mT).square().mean(), 1),
    "a stride": (lambda m, x: m.strided(x.mT).square().mean(), 1),
    "normed weights": (lambda m, x: m.normed(x.mT).square().mean(), 1),
    "read by its strides": (lambda m, x: m.plain(x.mT).view(len(x), -1)[:, 3:].square().mean(), 1),
    "without a gradient": (lambda m, x: m.plain(x.detach().mT).square().mean(), 1),
}
STAYS: dict[str, Step] = {
    "one sequence": lambda m, x: m.plain(x[0].t()).square().mean(),
    "groups": lambda m, x: m.grouped(x.mT).square().mean(),
    "one step": lambda m, x: m.of_one(x.reshape(4, WIDTH, 9)).square().mean(),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FIRED)
def test_it_fires(name: str) -> None:
    assert_fires(fusion.NAME, Layers(), FIRED[name][0], torch.randn(4, 9, WIDTH), FIRED[name][1])


@pytest.mark.parametrize("name", STAYS)
def test_it_declines(name: str) -> None:
    assert_declines(fusion.NAME, Layers(), STAYS[name], torch.randn(4, 9, WIDTH))


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("_MOST_FLOP", "more than 1e+01 floating-point operations"), ("_MOST_ELEMENTS", "more than 10 elements")],
)
def test_large_ones_stay(limit: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, limit, 10)
    assert declined(fusion.NAME, Layers(), FIRED["one"][0], torch.randn(4, 9, WIDTH)).endswith(reason)


def test_batches_of_any_size() -> None:
    engine, module = backend(), Layers()
    compiled = torch.compile(causal, backend=engine)
    for rows in (4, 7, 3):
        x = torch.randn(rows, 9, WIDTH)
        torch.testing.assert_close(compiled(module, x), causal(module, x))
    reports = [one for graph in engine.compile_log.graphs for one in graph.passes if one.name == fusion.NAME]
    assert {one.fired for one in reports} == {2}


def test_strides_are_those_of_eager() -> None:
    module, x = Layers(), torch.randn(4, 9, WIDTH)
    for step in (lambda x: module.plain(x.mT), lambda x: module.plain(x.reshape(4, WIDTH, 9))):
        assert torch.compile(step, backend=backend())(x).stride() == step(x).stride()
