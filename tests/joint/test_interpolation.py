"""Interpolation is one operator in the forward and one in the backward, also for dynamic sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.compare import assert_same_call, assert_same_step, backend

CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"mode": "nearest"}),
    (2, {"mode": "nearest"}),
    (3, {"mode": "nearest"}),
    (1, {"mode": "nearest-exact"}),
    (2, {"mode": "nearest-exact"}),
    (1, {"mode": "linear", "align_corners": True}),
    (2, {"mode": "bilinear"}),
    (2, {"mode": "bilinear", "align_corners": True}),
    (2, {"mode": "bilinear", "antialias": True}),
    (2, {"mode": "bicubic"}),
    (2, {"mode": "bicubic", "antialias": True}),
    (3, {"mode": "trilinear"}),
]


class Resized(nn.Module):
    def __init__(self, rank: int, settings: dict[str, Any]) -> None:
        super().__init__()
        layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.convolution = layer(2, 3, 3, padding=1)
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(self.convolution(x), **self.settings).square().mean()


def step(module: Any, x: Tensor) -> Tensor:
    return module(x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("rank", "settings"),
    [
        *((rank, {**settings, "size": 7}) for rank, settings in CASES),
        (1, {"mode": "linear", "scale_factor": 1.5}),
        (2, {"mode": "bilinear", "scale_factor": 1.5}),
        (2, {"mode": "nearest", "scale_factor": 1.5}),
    ],
    ids=str,
)
def test_interpolation_is_not_decomposed(rank: int, settings: dict[str, Any]) -> None:
    module = Resized(rank, settings)
    engine = assert_same_step(module, step, torch.randn(2, 2, *[6] * rank))
    (graph,) = engine.compile_log.graphs
    names = [name for name in graph.torch_operators if "upsample" in name]
    # Those along one axis are regions.
    expected = [] if settings["mode"] == "linear" else [False, True]
    assert sorted(name.endswith("_backward.default") for name in names) == expected
    assert not any("index" in name for name in graph.torch_operators)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "settings"),
    # One and three dimensions are scaled as two.
    [pytest.param(*case, marks=[pytest.mark.sweep] * (case[0] != 2)) for case in CASES],
    ids=str,
)
def test_one_graph_for_other_sizes(rank: int, settings: dict[str, Any]) -> None:
    module, engine = Resized(rank, {**settings, "scale_factor": 2}), backend()
    compiled = torch.compile(step, backend=engine)
    for batch, size in ((2, 6), (3, 5), (4, 8), (5, 9)):
        assert_same_call(module, step, compiled, torch.randn(batch, 2, *[size] * rank))
    graphs = engine.compile_log.graphs
    assert len(graphs) == 2, [(graph.shapes, graph.fixed_sizes) for graph in graphs]
    assert all(any("upsample" in name for name in graph.torch_operators) for graph in graphs)
