"""Convolutions of one step as matmuls: where they fire, where not, and values, gradients and strides of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_ort.fusions import fuse_pointwise_convolutions as fusion
from tests.compare import backend
from tests.fusions.convolutions import Step, assert_declines, assert_fires, declined

WIDTH = 6


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv1d(WIDTH, 10, 1)
        self.narrow = nn.Conv1d(10, WIDTH, 1, bias=False)
        self.same = nn.Conv1d(WIDTH, WIDTH, 1, padding="same")
        self.of_three = nn.Conv1d(WIDTH, 10, 3, padding=1)
        self.padded = nn.Conv1d(WIDTH, 10, 1, padding=1)
        self.strided = nn.Conv1d(WIDTH, 10, 1, stride=2)
        self.grouped = nn.Conv1d(WIDTH, 10, 1, groups=2)


FIRED: dict[str, tuple[Step, int]] = {
    "one": (lambda m, x: m.wide(x.transpose(1, 2)).transpose(1, 2).square().mean(), 1),
    "an activation between": (lambda m, x: (x + m.narrow(F.gelu(m.wide(x.mT))).mT).square().mean(), 2),
    "dropout between": (lambda m, x: m.narrow(F.dropout(m.wide(x.mT).relu(), 0.0)).square().mean(), 2),
    "the same padding": (lambda m, x: m.same(x.transpose(2, 1)).square().mean(), 1),
    "read by its strides": (lambda m, x: m.wide(x.mT).view(len(x), -1)[:, 3:].square().mean(), 1),
    "without a gradient": (lambda m, x: m.wide(x.detach().mT).square().mean(), 1),
}
STAYS: dict[str, Step] = {
    "contiguous": lambda m, x: m.wide(x.reshape(4, WIDTH, 5)).square().mean(),
    "one sequence": lambda m, x: m.wide(x[0].t()).square().mean(),
    "a window": lambda m, x: m.of_three(x.mT).square().mean(),
    "padding": lambda m, x: m.padded(x.mT).square().mean(),
    "a stride": lambda m, x: m.strided(x.mT).square().mean(),
    "groups": lambda m, x: m.grouped(x.mT).square().mean(),
    "another value between": lambda m, x: m.narrow(m.wide(x.reshape(4, WIDTH, 5)).relu()).square().mean(),
}


@pytest.mark.parametrize("name", FIRED)
def test_it_fires(name: str) -> None:
    assert_fires(fusion.NAME, Layers(), FIRED[name][0], torch.randn(4, 5, WIDTH), FIRED[name][1])


@pytest.mark.parametrize("name", STAYS)
def test_it_declines(name: str) -> None:
    assert_declines(fusion.NAME, Layers(), STAYS[name], torch.randn(4, 5, WIDTH))


def test_large_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_MOST_FLOP", 100)
    reason = declined(fusion.NAME, Layers(), FIRED["one"][0], torch.randn(4, 5, WIDTH))
    assert "more than 1e+02 floating-point operations" in reason


def test_batches_of_any_size() -> None:
    engine, module = backend(), Layers()
    compiled = torch.compile(FIRED["an activation between"][0], backend=engine, dynamic=True)
    for rows, steps in ((4, 5), (3, 7), (1, 2)):
        x = torch.randn(rows, steps, WIDTH)
        torch.testing.assert_close(compiled(module, x), FIRED["an activation between"][0](module, x))


def test_strides_are_those_of_eager() -> None:
    module, x = Layers(), torch.randn(4, 5, WIDTH)
    step = lambda x: module.wide(x.mT)  # noqa: E731
    assert torch.compile(step, backend=backend())(x).stride() == step(x).stride()
