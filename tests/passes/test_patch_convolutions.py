"""Convolutions whose windows don't overlap are matmuls of patches, and results and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compare import assert_same_call, assert_same_step, backend
from tests.passes.reports import report_of

LAST = torch.channels_last
Made = Callable[..., nn.Module]
# The layers behind another one, and the size of the images.
TILED: dict[str, tuple[Made, int]] = {
    "one pixel": (lambda channels: nn.Conv2d(channels, 5, 1), 16),
    "one pixel without a bias": (lambda channels: nn.Conv2d(channels, 5, 1, bias=False), 16),
    "patches": (lambda channels: nn.Conv2d(channels, 6, 4, stride=4), 16),
    "patches that are not square": (lambda channels: nn.Conv2d(channels, 6, (2, 4), stride=(2, 4)), 16),
    "one patch": (lambda channels: nn.Conv2d(channels, 6, 16, stride=16), 16),
    "transposed": (lambda channels: nn.ConvTranspose2d(channels, 6, 2, stride=2), 16),
    "transposed without a bias": (
        lambda channels: nn.ConvTranspose2d(channels, 6, (1, 3), stride=(1, 3), bias=False),
        9,
    ),
}
OTHERS: dict[str, tuple[Made, int]] = {
    "windows that overlap": (lambda channels: nn.Conv2d(channels, 6, 4, stride=2), 16),
    "pixels left out": (lambda channels: nn.Conv2d(channels, 6, 2, stride=3), 15),
    "one size for both dimensions": (lambda channels: nn.Conv2d(channels, 6, 4, stride=(4,), padding="valid"), 16),  # pyright: ignore[reportArgumentType]
    "padding": (lambda channels: nn.Conv2d(channels, 6, 2, stride=2, padding=1), 16),
    "a rest": (lambda channels: nn.Conv2d(channels, 6, 4, stride=4), 18),
    "groups": (lambda channels: nn.Conv2d(channels, channels, 2, stride=2, groups=channels), 16),
    "dilation": (lambda channels: nn.Conv2d(channels, 6, 2, stride=2, dilation=3), 16),
    "added pixels": (lambda channels: nn.ConvTranspose2d(channels, 6, 2, stride=2, output_padding=1), 16),
}


class Layers(nn.Module):
    def __init__(self, layer: nn.Module, is_first: bool) -> None:
        super().__init__()
        self.first = nn.Identity() if is_first else nn.Conv2d(3, 8, 3, padding=1)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(self.first(x).tanh()) * 0.3).sin()


def loss(module: Any, x: Tensor) -> Tensor:
    return module(x).square().mean()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("is_first", [True, False], ids=["of an input", "of a layer"])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(("name", "case"), [*TILED.items(), *OTHERS.items()], ids=[*TILED, *OTHERS])
def test_gradients_are_eagers(name: str, case: tuple[Made, int], last: bool, is_first: bool) -> None:
    make, size = case
    torch.manual_seed(0)
    x = torch.randn(4, 3, size, size)
    module = Layers(make(3 if is_first else 8), is_first)
    engine = assert_same_step(module, loss, x.contiguous(memory_format=LAST) if last else x)
    # A step has a convolution and its gradient.
    assert report_of(engine, "patch_convolutions").fired == (2 if name in TILED else 0)


@pytest.mark.parametrize("name", ["one pixel", "patches", "transposed"])
def test_gradients_of_images(name: str) -> None:
    make, size = TILED[name]
    layer, engine = make(3), backend()

    def gradient(x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(call(x).square().sum(), x)[0]

    x = torch.randn(4, 3, size, size, requires_grad=True)
    actual = gradient(x, torch.compile(layer, backend=engine))
    torch.testing.assert_close(actual, gradient(x, layer), rtol=1e-4, atol=1e-4)
    assert actual.is_contiguous()


def test_small_images_keep_convolutions_of_one_pixel() -> None:
    module = Layers(nn.Conv2d(3, 5, 1), True)
    engine = assert_same_step(module, loss, torch.randn(1, 3, 4, 4))
    assert report_of(engine, "patch_convolutions").fired == 0


def test_other_batch_sizes() -> None:
    module, engine = Layers(TILED["patches"][0](8), False), backend()
    step = torch.compile(loss, backend=engine)
    for batch in (4, 3, 5):
        assert_same_call(module, loss, step, torch.randn(batch, 3, 16, 16))
    for graph in engine.compile_log.graphs:
        assert graph.fallback is None
        assert sum(report.fired for report in graph.passes if report.name == "patch_convolutions") == 2
