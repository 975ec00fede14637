"""Dropout in regions: one mask in forward and backward, code shared by streams and probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

import lit_ort.ops.dropout  # noqa: F401  (defines the operator)
from lit_ort.regions.form_regions import RegionCall, Schedule, form_regions
from lit_ort.regions.graph_values import LibraryCall
from lit_ort.regions.symbolic_size import value_of
from tests.regions.run_schedule import graph_of, regions, run_schedule

if TYPE_CHECKING:
    from lit_ort.kernels.kernel_calls import KernelCache

P = (0.1, 0.4)


def step(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin()
    for stream, p in enumerate(P):
        y = (y @ x.mT @ x).sin()
        y = torch.ops.lit_ort.dropout(y, seed, p, stream)[0] + x
    loss = y.square().mean()
    return loss, y, *torch.autograd.grad(loss, [x])


def results(kernels: KernelCache, schedule: Schedule, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    def by_kernel(call: RegionCall, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        kernels.kernel(call.region).bind(call.run.map(value_of))(*inputs, *outputs)

    outputs = run_schedule(schedule, [x.detach(), torch.tensor(seed)], by_kernel)
    return [output for output in outputs if output is not None]


def test_dropout_is_a_region_and_its_gradient_has_its_mask(kernels: KernelCache) -> None:
    x = (torch.randn(30, 20, dtype=torch.float64) / 3).requires_grad_()
    schedule = form_regions(graph_of(step, x, torch.tensor(3)).graph)
    assert not [call for call in schedule.steps if isinstance(call, LibraryCall) and "mm" not in str(call.node.target)]
    off, eager = results(kernels, schedule, x, -1), step(x, torch.tensor(-1))
    for result, wanted in zip(off, eager, strict=True):
        torch.testing.assert_close(result, wanted.detach())
    first, second, other = (results(kernels, schedule, x, seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[1], other[1])
    # The gradient of the same seed, by differences along a direction.
    direction, distance = torch.randn(30, 20, dtype=torch.float64), 1e-5
    ahead, behind = (results(kernels, schedule, x + sign * distance * direction, 5)[0] for sign in (1, -1))
    slope = (ahead - behind) / (2 * distance)
    torch.testing.assert_close(slope, (first[2] * direction).sum(), rtol=1e-4, atol=1e-6)


def test_layers_with_other_streams_and_probabilities_share_code() -> None:
    x = torch.randn(30, 20).requires_grad_()
    schedule = form_regions(graph_of(step, x, torch.tensor(3)).graph)
    random = [call for call in regions(schedule) if "random" in call.region.to_json()]
    assert len(random) == len(P)
    assert len({call.region.key for call in random[:2]}) <= 2
    assert {call.run.scalars[:2] for call in random} == {(0, P[0]), (1, P[1])}
