"""Weight normalization as sums and products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.compare import assert_same_step
from tests.passes.reports import report_of


def step(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).tanh().square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [0, 2])
def test_norms_of_one_dimension(dim: int, dtype: torch.dtype) -> None:
    module = nn.Sequential(weight_norm(nn.Conv1d(8, 12, 5, padding=2), dim=dim), nn.ReLU()).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    engine = assert_same_step(module, step, torch.randn(3, 8, 20, dtype=dtype), tolerance=tolerance)
    assert report_of(engine, "weight_norms").fired == 2


def test_layers_of_a_module() -> None:
    module = nn.Sequential(weight_norm(nn.Linear(6, 9)), nn.GELU(), weight_norm(nn.Linear(9, 4), dim=1))
    engine = assert_same_step(module, step, torch.randn(5, 6))
    assert report_of(engine, "weight_norms").fired == 4


def test_the_norm_of_all_elements() -> None:
    """Which torch computes by operators of its own."""
    no_dimension: Any = None
    module = nn.Sequential(weight_norm(nn.Linear(6, 9), dim=no_dimension), nn.GELU())
    engine = assert_same_step(module, step, torch.randn(5, 6))
    assert report_of(engine, "weight_norms").fired == 0
