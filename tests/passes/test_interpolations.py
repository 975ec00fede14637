"""Gradients of interpolations: with channels last where that is faster, and the same values as in eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compare import assert_same_step, backend, relative_error


class Pyramid(nn.Module):
    """Images of several sizes, interpolated to one and stacked, as in heads of segmentation."""

    def __init__(self, mode: str, has_convolution: bool) -> None:
        super().__init__()
        self.mode = mode
        self.levels = nn.ModuleList(nn.Conv2d(3, 8, 3, 2**k, 1) for k in range(3))
        self.head = nn.Conv2d(24, 5, 1) if has_convolution else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        levels = [F.interpolate(level(x).relu(), size=size, mode=self.mode) for level in self.levels]
        return self.head(torch.cat(levels, 1)).square().mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("has_convolution", [True, False])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_a_step_with_interpolations(mode: str, has_convolution: bool) -> None:
    assert_same_step(Pyramid(mode, has_convolution), lambda module, x: module(x), torch.randn(4, 3, 32, 32))


@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "slice"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_gradients_that_arrive_in_any_layout(mode: str, layout: str, channels: int) -> None:
    gradient = torch.randn(2, 2 * channels, 8, 8)
    if layout != "contiguous":
        gradient = gradient.contiguous(memory_format=torch.channels_last)
    gradient = gradient[:, :channels] if layout == "slice" else gradient[:, :channels].clone()

    def enlarged(x: Tensor) -> Tensor:
        return F.interpolate(x * 2, scale_factor=2.0, mode=mode).sin()

    found = []
    for call in (enlarged, torch.compile(enlarged, backend=backend())):
        x = torch.randn(2, channels, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        (result,) = torch.autograd.grad(call(x), x, gradient)
        found.append(result)
    assert relative_error(found[1], found[0]) < 1e-5
