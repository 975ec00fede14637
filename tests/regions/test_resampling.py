"""Interpolations and maximum pools along one axis: regions of a native session, with eager's results."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compare import backend, relative_error


def interpolated(x: Tensor, size: int | None = None, scale: float | None = None, is_aligned: bool = False) -> Tensor:
    return F.interpolate(x, size, scale, "linear", align_corners=is_aligned)


Function = Callable[[Tensor], Tensor]
REGIONS: dict[str, Function] = {
    "more elements": lambda x: interpolated(x, 29),
    "fewer elements": lambda x: interpolated(x, 5),
    "one element": lambda x: interpolated(x, 1),
    "of one element": lambda x: interpolated(x[..., :1], 7),
    "corners": lambda x: interpolated(x, 29, is_aligned=True),
    "corners of one element": lambda x: interpolated(x, 1, is_aligned=True),
    "a scale": lambda x: interpolated(x, scale=2.3),
    "a small scale": lambda x: interpolated(x, scale=0.4),
    "windows": lambda x: F.max_pool1d(x, 3),
    "a window that ends behind the row": lambda x: F.max_pool1d(x, 5, ceil_mode=True),
    "windows that overlap": lambda x: F.max_pool1d(x, 5, 2, 2),
    "windows apart": lambda x: F.max_pool1d(x, 2, 3),
    "windows of one element": lambda x: F.max_pool1d(x, 1),
}
TORCH_NODES: dict[str, Function] = {
    "a scale that changes no size": lambda x: interpolated(x, scale=1.05),
    "long windows": lambda x: F.max_pool1d(x, 17, 1, 8),
    "dilation": lambda x: F.max_pool1d(x, 3, 1, 1, 2),
    "images": lambda x: F.max_pool2d(x, 2),
    "a bilinear interpolation": lambda x: F.interpolate(x[None], (9, 20), mode="bilinear"),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*REGIONS, *TORCH_NODES])
def test_results_and_gradients_are_eagers(name: str, dtype: torch.dtype) -> None:
    function: Function = {**REGIONS, **TORCH_NODES}[name]

    def step(x: Tensor, w: Tensor) -> Tensor:
        return (function((x @ w).sin()) * 2).exp()

    compiled = torch.compile(step, backend=(engine := backend()), dynamic=False)
    x, w = torch.randn(4, 3, 13, dtype=dtype), torch.randn(13, 13, dtype=dtype) / 4
    weight = torch.randn(step(x, w).shape, dtype=dtype)
    found = []
    for call in (step, compiled):
        given = [one.clone().requires_grad_() for one in (x, w)]
        result = call(*given)
        found.append([result.detach(), *torch.autograd.grad((result * weight).sum(), given)])
    assert all(relative_error(actual, expected) < 1e-5 for expected, actual in zip(*found, strict=True))
    operators = [set(graph.torch_operators) for graph in engine.compile_log.graphs]
    of_windows = {one for names in operators for one in names if "upsample" in one or "max_pool" in one}
    assert bool(of_windows) == (name in TORCH_NODES), of_windows


def test_batches_of_any_size() -> None:
    def step(x: Tensor) -> Tensor:
        return interpolated(F.max_pool1d(x.sin(), 3), 11).exp()

    compiled = torch.compile(step, backend=(engine := backend()))
    for rows in (4, 7, 9):
        x = torch.randn(rows, 3, 13)
        torch.testing.assert_close(compiled(x), step(x))
    names = [name for graph in engine.compile_log.graphs for name in graph.torch_operators]
    assert not any("upsample" in name or "max_pool" in name for name in names)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.sampled(1)
def test_values_that_are_not_finite(value: float) -> None:
    x = torch.randn(2, 3, 13)
    x[0, 1, 4], x[1, 2, :6], x[1, 0, -1] = value, value, value
    for name in ("more elements", "a scale that changes no size", "corners", "windows", "windows that overlap"):
        function: Function = {**REGIONS, **TORCH_NODES}[name]
        found = []
        for call in (function, torch.compile(function, backend=backend())):
            given = x.clone().requires_grad_()
            result = call(given)
            found.append([result.detach(), *torch.autograd.grad(result.sum(), given)])
        for expected, actual in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, equal_nan=True)
