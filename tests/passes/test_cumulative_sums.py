"""Cumulative sums of whole numbers are eager's, and regions compute short ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compare import backend

X = torch.randint(-9, 9, (3, 12, 16), generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Tensor, int]] = {
    "the last dimension": (X, -1),
    "another dimension": (X, 1),
    "the first dimension": (X, 0),
    "one row": (X[0, 0], 0),
    "a prime size": (X[..., :13], 2),
    "one element": (X[..., :1], 2),
    "int32": (X.int(), 2),
    "uint8": (X.abs().to(torch.uint8), 2),
    "booleans": (X > 0, 2),
    "a transposed value": (X.transpose(1, 2), 1),
}


def cumulative(x: Tensor, weight: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """A graph of a view alone would have no session."""
    sums = x.cumsum(dim)
    return sums, (weight @ weight).exp() * sums.sum()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_short_sums_are_regions(case: tuple[Tensor, int]) -> None:
    x, dim = case
    engine, weight = backend(), torch.rand(4, 4)
    actual, expected = (step(x, weight, dim) for step in (torch.compile(cumulative, backend=engine), cumulative))
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1])
    assert "aten.cumsum.default" not in engine.compile_log.graphs[0].torch_operators


KEPT: dict[str, Tensor] = {
    "floats": X.float(),
    "more than pay": torch.ones(64, 4096, dtype=torch.int64),
    "no element": X[:, :, :0],
    "a number": torch.tensor(3),
}


@pytest.mark.parametrize("x", KEPT.values(), ids=KEPT)
def test_others_are_torchs(x: Tensor) -> None:
    engine, weight = backend(), torch.rand(4, 4)
    actual, expected = (step(x, weight, -1) for step in (torch.compile(cumulative, backend=engine), cumulative))
    torch.testing.assert_close(actual, expected)
    assert not any(one.fired for one in engine.compile_log.graphs[0].passes if one.name == "cumulative_sums")


def test_the_sums_are_contiguous() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        sums = x.cumsum(0)
        return sums.as_strided((4,), (1,)).float() * 2, sums.view(torch.int32) * 3

    x = torch.arange(6).view(2, 3)
    for actual, expected in zip(torch.compile(step, backend=backend())(x), step(x), strict=True):
        assert torch.equal(actual, expected)


def test_batches_of_any_size() -> None:
    engine, weight = backend(), torch.rand(4, 4)
    step = torch.compile(cumulative, backend=engine)
    for rows in (3, 2, 7, 5):
        x = torch.randint(9, (rows, 12))
        assert torch.equal(step(x, weight, 1)[0], x.cumsum(1))
    graphs = engine.compile_log.graphs
    assert len(graphs) == 2
    assert all("aten.cumsum.default" not in graph.torch_operators for graph in graphs)
