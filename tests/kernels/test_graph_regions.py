"""Graphs with gradients through regions and their machine code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from lit_ort.regions.form_regions import RegionCall, form_regions
from lit_ort.regions.symbolic_size import value_of
from tests.regions.run_schedule import graph_of, run_schedule, with_gradients

if TYPE_CHECKING:
    from lit_ort.kernels.kernel_calls import KernelCache


def residual(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return (x + F.gelu(F.layer_norm(x, (40,), w[0], w[1]) @ u)).square().mean()


def attention(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    q = (x @ u).view(3, 7, 2, 20).transpose(1, 2)
    weights = (q @ q.transpose(-1, -2) * 0.2).softmax(-1)
    return ((weights @ q).transpose(1, 2).reshape(3, 7, 40) * w[0]).log_softmax(-1)[..., 5].mean()


def gates(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    y = F.silu(x @ u) * torch.sigmoid(x + w[0]) + F.softplus(x).tanh() + F.leaky_relu(x - w[1])
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).exp().sum((0, 1)).std()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("function", [residual, attention, gates])
def test_a_step_through_regions_is_as_near_to_the_exact_one_as_eager(
    function: Callable[..., torch.Tensor], dtype: torch.dtype, kernels: KernelCache
) -> None:
    def by_kernel(call: RegionCall, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        kernels.kernel(call.region).bind(call.run.map(value_of))(*inputs, *outputs)

    shapes = (3, 7, 40), (2, 40), (40, 40)
    args = [(torch.randn(shape) / 3).to(dtype).requires_grad_() for shape in shapes]
    step = with_gradients(function, 3)
    schedule = form_regions(graph_of(step, *args).graph)
    results = run_schedule(schedule, [arg.detach() for arg in args], by_kernel)
    exact = step(*(arg.detach().double().requires_grad_() for arg in args))
    for result, eager, right in zip(results, step(*args), exact, strict=True):
        assert result is not None
        assert result.dtype == eager.dtype
        own, other = ((value.detach().double() - right.detach()).norm() for value in (result, eager))
        assert own <= 2 * other + 4 * torch.finfo(dtype).eps * right.norm(), str(schedule)
