"""Values of regions as torch's operators leave them in memory: their dtypes, roundings, places and special numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.compare import backend

HALF, BRAIN = torch.float16, torch.bfloat16
LONG = 10_000_000


def copied_by_a_reshape(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    z = (x @ w).t().reshape(32, 256)
    a = z.sum(1).view(1, 32)
    for _ in range(8):
        a = (a @ v).tanh()
    return z * a.t()


def compared_with_a_number(x: Tensor) -> tuple[Tensor, ...]:
    return x > 0.1, x == 0.1, x > torch.tensor(0.1), x.clamp(-0.1, 0.1)


def promoted_constants(x: Tensor, y: Tensor, i: Tensor, small: Tensor) -> tuple[Tensor, ...]:
    low = torch.full((4,), 0.1, dtype=BRAIN)
    return (
        torch.full((4,), 0.1) + x, low + y, low.float(), torch.full_like(i, 2.7) + y, torch.full_like(small, -1) + i
    )  # fmt: skip


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a reshape that copies": (
        copied_by_a_reshape,
        (torch.randn(128, 16), torch.randn(16, 64), torch.randn(32, 32) / 6),
    ),
    "a mean beyond the range of its sum": (lambda x: x.mean(-1), (torch.full((4, 1024), 100.0, dtype=HALF),)),
    "a mean of rows": (lambda x: x.mean(-1), (torch.ones(1, 257, dtype=BRAIN),)),
    "a mean of columns": (lambda x: x.mean(0), (torch.ones(257, 4, dtype=BRAIN),)),
    "a sum as int32": (lambda m: m.sum(-1, dtype=torch.int32) + 1, (torch.ones(4, 8, dtype=torch.bool),)),
    "a sum as uint8": (lambda m: m.sum(dtype=torch.uint8).float(), (torch.ones(300, dtype=torch.bool),)),
    "comparisons": (compared_with_a_number, (torch.tensor([0.1, 0.2, -0.3], dtype=BRAIN),)),
    "powers of a number": (lambda x: 0.1**x, (torch.linspace(-30, 30, 99, dtype=BRAIN),)),
    "constants": (
        promoted_constants,
        (torch.zeros(4, dtype=torch.float64), torch.zeros(4), torch.zeros(4, dtype=torch.int64), torch.zeros(4).byte()),
    ),
    "a long sum": (lambda x: x.sum(), (torch.full((LONG,), 0.1),)),
    "a long sum of a prime number": (lambda x: x.sum(), (torch.full((4_999_999,), 0.1),)),
    "long sums of rows": (lambda x: (x.sum(-1), x.sum(), x.mean(-1)), (torch.full((2, 1_000_003), 0.1),)),
    "long sums of columns": (lambda x: (x.sum(0), x.square().sum((0, 2))), (torch.full((500_000, 2, 1), 0.1),)),
    "a flipped view": (
        lambda x, i, j: (x.flip(1)[i, j], x.flip(0)[i, j]),
        (torch.arange(20.0).view(2, 10), torch.tensor([0, 1]), torch.tensor([3, 0])),
    ),
    "dropped values that are not finite": (
        lambda x: F.dropout(x, 0.5).isnan().all(),
        (torch.full((1000,), torch.nan),),
    ),
}


@pytest.mark.parametrize(("function", "arguments"), CASES.values(), ids=CASES)
@pytest.mark.usefixtures("uses_openmp")
@pytest.mark.sampled(12)
def test_values_are_those_of_eager(function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(torch.compile(function, backend=backend())(*arguments), function(*arguments))


@pytest.mark.usefixtures("uses_openmp")
def test_recomputed_dropout_with_a_strided_sum_has_the_same_mask() -> None:
    def part(h: Tensor) -> Tensor:
        dropped = F.dropout(h.t(), 0.5)
        return (dropped * dropped).sum(1)

    def function(h: Tensor) -> tuple[Tensor, Tensor]:
        z: Any = checkpoint(part, h, use_reentrant=False)
        return z.sum(), z

    h = torch.randn(64, 128, requires_grad=True)
    loss, z = torch.compile(function, backend=backend())(h)
    loss.backward()
    assert h.grad is not None
    torch.testing.assert_close((h.grad * h).sum(0), 2 * z, rtol=1e-4, atol=1e-4)


def with_numbers(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    number = torch.tensor(0.1)
    return (
        x % 0.1, torch.fmod(x, 0.1), x % number, x // 0.1, x.div(0.1, rounding_mode="trunc"), x + 0.1, 0.1 - x, x * 0.1,
        x / 0.1, torch.add(x, y, alpha=0.1), torch.sub(x, y, alpha=0.1), torch.add(x, 3.0, alpha=0.1),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_numbers_are_rounded_to_16_bits_where_torch_does_so(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compiled = torch.compile(with_numbers, backend=backend())
    for count in (1, 2000):
        x, y = 20 * torch.randn(count, dtype=dtype), torch.randn(count, dtype=dtype)
        torch.testing.assert_close(compiled(x, y), with_numbers(x, y), rtol=0, atol=0, equal_nan=True)


def test_elements_of_a_flipped_view_of_changing_sizes() -> None:
    def function(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return x.flip(0)[i, j] * 2

    compiled = torch.compile(function, backend=backend(), dynamic=True)
    for rows, columns in ((5, 4), (7, 3)):
        arguments = torch.randn(rows, columns), torch.arange(rows), torch.arange(rows) % columns
        torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_long_sums_of_changing_sizes() -> None:
    compiled = torch.compile(lambda x: (x.sum(-1), x.tanh().sum(0)), backend=backend(), dynamic=True)
    for size in (500_000, 1_000_003):
        x = torch.full((size, 3), 0.1)
        torch.testing.assert_close(compiled(x.t()), (x.t().sum(-1), x.t().tanh().sum(0)))
        torch.testing.assert_close(compiled(x), (x.sum(-1), x.tanh().sum(0)))


def test_an_alpha_that_depends_on_a_size() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, alpha=1 / x.shape[0]).tanh()

    engine = backend()
    compiled = torch.compile(function, backend=engine)
    for rows in (4, 6, 8, 10):
        x, y = torch.randn(2, rows, 3)
        torch.testing.assert_close(compiled(x, y), function(x, y))
    assert len(engine.compile_log.graphs) == 2
