"""Gradients of gathers: rows are added in order, and the result is eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_ort import SessionError
from tests.compare import backend, relative_error

Case = tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[int, ...]]
# A function of x of a shape, and of indices below 100 and below 50.
ADDED: dict[str, Case] = {
    "rows": (lambda x, i, j: x[i], (100, 8)),
    "elements": (lambda x, i, j: x[i], (100,)),
    "from the end": (lambda x, i, j: x[i - 50], (100, 8)),
    "indices of two dimensions": (lambda x, i, j: x[i.view(10, -1)], (100, 8)),
    "the second dimension": (lambda x, i, j: x[:, i], (3, 100, 8)),
    "two indices": (lambda x, i, j: x[i, j], (100, 50, 3)),
    "two from the end": (lambda x, i, j: x[i - 100, j - 50], (100, 50)),
    "two behind another dimension": (lambda x, i, j: x[:, i, j], (2, 100, 50, 8)),
    "two that broadcast": (lambda x, i, j: x[i[:, None], j[None, :20]], (100, 50)),
    "int32": (lambda x, i, j: x[i.int()], (100, 8)),
    "an assignment": (lambda x, i, j: torch.zeros(100, 8).index_put((i,), x[j], accumulate=True), (50, 8)),
    "the last of each": (lambda x, i, j: x[torch.arange(len(x)), -1], (100, 5, 8)),
}
KEPT: dict[str, Case] = {
    "narrow rows of the second dimension": (lambda x, i, j: x[:, i], (3, 100)),
    "indices apart": (lambda x, i, j: x[i, :, j], (100, 4, 50)),
    "a mask": (lambda x, i, j: x[:, x[0] > 0], (3, 40)),
    "values of one row": (lambda x, i, j: torch.zeros(100, 8).index_put((i,), x[0], accumulate=True), (100, 8)),
    "without a sum": (lambda x, i, j: torch.zeros(100, 8).index_put((j[:1],), x[:1]), (100, 8)),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dynamic", [False, True], ids=["sizes", "any_sizes"])
@pytest.mark.parametrize(("name", "case"), [*ADDED.items(), *KEPT.items()], ids=[*ADDED, *KEPT])
def test_gradients_are_eagers(name: str, case: Case, dynamic: bool) -> None:
    function, shape = case
    engine = backend()
    compiled = torch.compile(function, backend=engine, dynamic=dynamic)
    for count in (200, 300) if dynamic else (200,):
        i, j, found = torch.randint(100, (count,)), torch.randint(50, (count,)), []
        for call in (function, compiled):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
            result = call(x, i, j)
            found += [result.detach(), *torch.autograd.grad(result.square().sum(), x)]
        assert relative_error(found[2], found[0]) < 1e-6
        assert relative_error(found[3], found[1]) < 1e-5
    (graph,) = engine.compile_log.graphs
    assert any(one.fired for one in graph.passes if one.name == "indexed_sums") == (name in ADDED)


def test_an_invalid_index_is_named() -> None:
    step = torch.compile(lambda i, x: torch.zeros(4, 2).index_put((i,), x, accumulate=True).sum(), backend=backend())
    with pytest.raises(SessionError, match="index 4 is out of range: it selects from 4, so indices must be 0 to 3"):
        step(torch.tensor([0, 4]), torch.ones(2, 2, requires_grad=True))


def test_graphs_pass_messages_between_nodes() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(50, 16)
    edges = torch.randint(50, (2, 400))

    def step(x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.zeros_like(x).index_add(0, edges[1], layer(x)[edges[0]].relu()) + x
        return x.square().mean()

    found = []
    for call in (step, torch.compile(step, backend=backend())):
        call(x).backward()
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
        layer.zero_grad()
    assert relative_error(found[1], found[0]) < 1e-5


def test_sums_in_bfloat16_are_rounded_once() -> None:
    """In eager, 256 + 1 is 256 in bfloat16."""
    x, index = torch.randn(4, 8).bfloat16().requires_grad_(), torch.zeros(1000, dtype=torch.int64)
    torch.compile(lambda x: x[index].sum(), backend=backend())(x).backward()
    assert x.grad is not None
    assert x.grad[0].eq(1000).all()
    assert not x.grad[1:].any()
