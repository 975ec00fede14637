"""Rows that are added at indices, and writes at one index: regions of a native session, with eager's results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_ort import SessionError
from tests.compare import backend, relative_error

# Functions of x: float[5, 4], y: float[13, 4] and i: int64[13], below 5.
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(5, x.shape[1])


def at(i: Tensor, y: Tensor) -> Tensor:
    """The index of each element of rows."""
    return i[:, None].expand(-1, y.shape[1])


REGIONS: dict[str, Function] = {
    "to nothing": lambda x, y, i: zeros(x).index_add(0, i, y.sin()) * x,
    "to a value": lambda x, y, i: x.exp().index_add(0, i, y).sin(),
    "to a value in place": lambda x, y, i: (x * 2).index_add_(0, i, y).sin(),
    "of the second dimension": lambda x, y, i: x.expand(2, -1, -1).index_add(1, i, y.expand(2, -1, -1)),
    "of several dimensions": lambda x, y, i: torch.stack([x, x.sin()], 1).index_add(0, i, torch.stack([y, y.exp()], 1)),
    "at int32 indices": lambda x, y, i: x.index_add(0, i.int(), y),
    "at expanded indices": lambda x, y, i: zeros(x).scatter_add(0, at(i, y), y) * x,
    "at repeated indices": lambda x, y, i: (
        zeros(x).scatter_reduce(0, i[:, None].repeat(1, 4), y, "sum", include_self=False) * x
    ),
    "gathered rows": lambda x, y, i: x[i] * y,
    "at one index": lambda x, y, i: x.index_put((torch.tensor([2]),), y[0]) * y.sum(),
    "at one index of the last dimension": lambda x, y, i: (
        torch.ops.aten.index_put(x, [None, torch.tensor(-1)], x[:, 0]) * y.sum()
    ),
    "at one index, as a sum": lambda x, y, i: x.index_put((torch.tensor(3),), y[1], accumulate=True),
}
TORCH_NODES: dict[str, Function] = {
    "elements": lambda x, y, i: zeros(x).scatter_add(0, at(i, y) * y.gt(0), y) * x,
    "of seven dimensions": lambda x, y, i: (
        x.exp()
        * torch.zeros(5, 2, 2, 2, 2, 2, 2)
        .index_add(0, i, y[:, :2].view(-1, 1, 1, 1, 1, 1, 2).expand(-1, *[2] * 6))
        .sum()
    ),
    "few rows of a large value": lambda x, y, i: x.repeat(1, 5000).exp().index_add(0, i[:1], y[:1].repeat(1, 5000)),
    "of the last dimension": lambda x, y, i: torch.zeros(4, 5).index_add(1, i, y.t()) @ x,
    "scaled": lambda x, y, i: x.index_add(0, i, y, alpha=2),
    "means": lambda x, y, i: zeros(x).scatter_reduce(0, at(i, y), y, "mean") * x,
    "sums that replace a value": lambda x, y, i: x.scatter_reduce(0, at(i, y), y, "sum", include_self=False),
    "at two indices": lambda x, y, i: x.index_put((torch.tensor([2, 3]),), y[:2]),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dynamic", [False, True], ids=["sizes", "any sizes"])
@pytest.mark.parametrize("name", [*REGIONS, *TORCH_NODES])
def test_results_and_gradients_are_eagers(name: str, dynamic: bool) -> None:
    function: Callable[..., Tensor] = {**REGIONS, **TORCH_NODES}[name]
    compiled = torch.compile(function, backend=(engine := backend()), dynamic=dynamic)
    for count in (13, 40, 3) if dynamic else (13,):
        x, y, indices = torch.randn(5, 4), torch.randn(count, 4), torch.randint(0, 5, (count,))
        found = []
        for call in (function, compiled):
            given = [one.clone().requires_grad_() for one in (x, y)]
            result = call(*given, indices)
            found.append([result.detach(), *torch.autograd.grad(result.square().sum(), given, allow_unused=True)])
        for expected, actual in zip(*found, strict=True):
            assert (expected is None) == (actual is None)
            if expected is not None:
                assert relative_error(actual, expected) < 1e-5
    operators = [set(graph.torch_operators) for graph in engine.compile_log.graphs]
    of_sums = {one for names in operators for one in names if any(word in one for word in ("scatter", "index"))}
    assert bool(of_sums) == (name in TORCH_NODES), of_sums


@pytest.mark.parametrize("name", ["to nothing", "of the second dimension", "at expanded indices", "gathered rows"])
@pytest.mark.parametrize("wrong", [5, -6])
def test_an_index_outside_of_the_rows_is_an_error(name: str, wrong: int) -> None:
    compiled = torch.compile(REGIONS[name], backend=backend())
    indices = torch.tensor([1, wrong, 2])
    with pytest.raises(SessionError, match=rf"{wrong} |not accept|doesn't accept|out of range"):
        compiled(torch.randn(5, 4), torch.randn(3, 4), indices)
