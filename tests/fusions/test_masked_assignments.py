"""Masked assignments of values that require grad: one graph, with the results of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_ort.errors import LitOrtWarning
from tests.compare import assert_same_step, backend
from tests.passes.reports import report_of

NAME = "masked_assignments"
ROWS = torch.tensor([True, False, True, True])
CELLS = torch.tensor([[True, False, False], [False, True, True], [False, False, False], [True, True, False]])
COLUMNS = torch.tensor([False, True, True])


class Filled(nn.Module):
    """Assigns a parameter to elements of a copy of its input, which has the shape (4, 3, 5).

    Args:
        shape: the shape of the parameter.
        assign: makes the assignment to the copy.
    """

    def __init__(self, shape: tuple[int, ...], assign: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(shape))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.assign = assign

    def forward(self, x: Tensor) -> Tensor:
        changed = x * self.scale
        changed = self.assign(changed, self.values)
        return (changed.square() * torch.arange(5)).sum()


def assigning(*index: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def assign(x: Tensor, values: Tensor) -> Tensor:
        x[index] = values
        return x

    return assign


def to_a_view(x: Tensor, values: Tensor) -> Tensor:
    x[1:, :, 2][CELLS[1:]] = values
    return x


CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Any]]] = {
    "scalar": ((), assigning(ROWS)),
    "broadcast row": ((5,), assigning(CELLS)),
    "broadcast row with a dimension of 1": ((1, 5), assigning(CELLS)),
    "broadcast matrix": ((3, 5), assigning(ROWS)),
    "one row for each element": ((5, 5), assigning(CELLS)),
    "one row for each column": ((4, 2, 5), assigning(slice(None), COLUMNS)),
    "broadcast row in columns": ((1, 5), assigning(slice(None), COLUMNS)),
    "mask of all dimensions": ((), lambda x, values: x.index_put((x.detach() > 0.3,), values)),
    "view": ((), to_a_view),
    "accumulate": ((5,), lambda x, values: x.index_put((CELLS,), values, accumulate=True)),
    "accumulate in place": ((5, 5), lambda x, values: x.index_put_((CELLS,), values, accumulate=True)),
    "nothing selected": ((0, 5), assigning(torch.zeros(4, 3, dtype=torch.bool))),
    "nothing selected, broadcast row": ((5,), assigning(torch.zeros(4, 3, dtype=torch.bool))),
    "everything selected": ((12, 5), assigning(torch.ones(4, 3, dtype=torch.bool))),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_same_results_as_eager(name: str) -> None:
    engine = assert_same_step(Filled(*CASES[name]), lambda module, x: module(x), torch.randn(4, 3, 5))
    assert report_of(engine, NAME).fired == 1


@pytest.mark.parametrize("shape", [(2, 5), (7, 5)])
def test_a_wrong_number_of_values_raises_as_in_eager(shape: tuple[int, ...]) -> None:
    step = torch.compile(Filled(shape, assigning(CELLS)), backend=backend(fallback="warn"))
    with pytest.raises(RuntimeError, match="cannot be broadcast to indexing result"):
        step(torch.randn(4, 3, 5))


def test_dynamic_sizes() -> None:
    def assign(x: Tensor, values: Tensor) -> Tensor:
        x[x[:, :, 0].detach() > 0] = values
        return x

    engine = backend()
    module = Filled((5,), assign)
    step = torch.compile(module, backend=engine)
    for rows in (4, 6, 3, 9):
        x = torch.randn(rows, 3, 5)
        torch.testing.assert_close(step(x), module(x))
    assert len(engine.compile_log.graphs) <= 2


def test_values_without_gradients_are_not_rewritten() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        hidden = module(x)
        hidden[hidden > 1] = 0.5
        return hidden.square().sum()

    engine = backend()
    torch.compile(step, backend=engine)(nn.Linear(5, 5), torch.randn(4, 5)).backward()
    assert report_of(engine, NAME).fired == 0


def test_values_that_require_grad_because_of_an_in_place_change() -> None:
    def assign(x: Tensor, values: Tensor) -> Tensor:
        rows = torch.zeros(4, 5)
        rows[:2].add_(values)
        x[CELLS] = rows[1]
        return x

    engine = assert_same_step(Filled((5,), assign), lambda module, x: module(x), torch.randn(4, 3, 5))
    assert report_of(engine, NAME).fired == 1


def test_masks_with_other_indices_are_not_rewritten() -> None:
    module = Filled((), assigning(ROWS, torch.tensor([1, 2, 0])))
    engine = backend(fallback="warn")
    with pytest.warns(LitOrtWarning, match="nonzero"):
        torch.compile(module, backend=engine)(torch.randn(4, 3, 5))
