"""The last axis of a region is no short one, and its values are those of any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from lit_ort.regions.symbolic_size import value_of
from tests.compare import backend
from tests.regions.run_schedule import regions
from tests.regions.test_form_regions import check

SHORT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "windows of two channels": lambda x: x.unfold(2, 48, 1).permute(0, 2, 3, 1).contiguous() * 2,
    "their sums": lambda x: x.unfold(2, 48, 1).permute(0, 2, 3, 1).exp().sum((1, 2, 3)),
    "channels last": lambda x: (x.permute(0, 2, 1) * 2).contiguous(),
    "one of three, padded": lambda x: F.pad(x.reshape(-1, 1) * 2, (0, 2)),
    "by index": lambda x: (torch.arange(2) * x.permute(0, 2, 1)).contiguous(),
    "gathered": lambda x: x.permute(0, 2, 1)[:, torch.arange(159, -1, -1)] + torch.arange(2),
    "masked": lambda x: torch.where(torch.arange(2) > 0, x.permute(0, 2, 1), 3.0),
    "a mean of the middle and the last": lambda x: x.transpose(1, 2).exp().mean((1, 2)),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_axis_is_not_the_last_one(name: str) -> None:
    schedule = check(SHORT[name], torch.randn(16, 2, 160, generator=torch.Generator().manual_seed(0)))
    assert all(value_of(one.run.sizes[-1]) > 16 for one in regions(schedule))


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows are reduced": lambda x: x.permute(0, 2, 1).softmax(-1),
    "contiguous": lambda x: x[:, :, :2].contiguous() * 2,
}


@pytest.mark.parametrize("name", KEPT)
def test_other_orders_stay(name: str) -> None:
    schedule = check(KEPT[name], torch.randn(16, 2, 160, generator=torch.Generator().manual_seed(0)))
    assert value_of(regions(schedule)[-1].run.sizes[-1]) == 2


def test_rows_of_any_sizes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.permute(0, 2, 3, 1) * 2).contiguous() + torch.arange(3)

    compiled = torch.compile(function, backend=backend(), dynamic=True)
    for sizes in ((4, 3, 5, 20), (2, 3, 7, 1), (0, 3, 5, 20), (4, 3, 0, 20), (4, 3, 5, 0), (70, 3, 9, 33)):
        x = torch.randn(sizes)
        torch.testing.assert_close(compiled(x), function(x))
