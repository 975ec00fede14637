"""Functions whose numbers or layouts change from call to call, and code around which modes or values change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compare import backend

CLASSES, ROWS, WIDTH = 6000, 60, 8
Calls = Sequence[tuple[Any, ...]]


def mixed(x: Tensor, share: float) -> Tensor:
    return (torch.tensor([share, 1 - share]) * x[:, :2]).sum(0)


def rotated(x: Tensor, angle: float) -> Tensor:
    cosine, sine = math.cos(angle), math.sin(angle)
    return x[:, :2] @ torch.tensor([[cosine, -sine], [sine, cosine]])


def tensor_of_one(x: Tensor, k: int) -> Tensor:
    return x.sum() + torch.tensor([k])


def with_a_size(x: Tensor, k: float) -> Tensor:
    return x * torch.tensor([k, x.shape[0], 2.0]).sum()


def with_numpys_default(x: Tensor, k: float) -> Tensor:
    return x * torch.tensor([k, 1], dtype=torch.float64).prod()


def rebound(x: Tensor, beta: float) -> Tensor:
    total: Any = beta
    total += x.square().mean()
    return total + beta * x.sum()


def scaled_in_place(x: Tensor, beta: float) -> Tensor:
    factor: Any = beta
    factor *= x
    return factor + beta


def changed_tensor(x: Tensor, beta: float) -> Tensor:
    value = torch.tensor(beta)
    other = torch.tensor(beta)
    value += 1.0
    return (value + other) * x + beta


def kept_and_added(x: Tensor, k: int) -> Tensor:
    return x.to(torch.uint8) + k


def windows(x: Tensor, k: float) -> tuple[Tensor, Tensor, Tensor]:
    return (x * k).mean(), x[1:], x.t()


NUMBERS = [
    mixed, rotated, tensor_of_one, with_a_size, with_numpys_default, rebound, scaled_in_place, changed_tensor,
]  # fmt: skip


def same(function: Callable[..., Any], calls: Calls, rtol: float | None = None, atol: float | None = None) -> None:
    """Compares results and gradients of each call with eager's."""
    compiled = torch.compile(function, backend=backend())
    for arguments in calls:
        found = []
        for call in (function, compiled):
            inputs = [value.detach().requires_grad_() if _is_float(value) else value for value in arguments]
            results = call(*inputs)
            parts = [part for part in (results if isinstance(results, tuple) else (results,)) if part.requires_grad]
            if parts:
                totals = [(part * torch.arange(1, part.numel() + 1).view(part.shape)).sum() for part in parts]
                torch.stack(totals).sum().backward()
            found.append((results, [value.grad for value in inputs if _is_float(value)]))
        torch.testing.assert_close(found[1], found[0], rtol=rtol, atol=atol)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("function", NUMBERS)
def test_numbers_that_change(function: Callable[..., Any]) -> None:
    numbers = (1, 2, 5, 3) if function is tensor_of_one else (0.25, 0.5, 0.7, 0.3)
    same(function, [(torch.randn(5, 3), number) for number in numbers])


def test_an_integer_that_does_not_fit() -> None:
    same(kept_and_added, [(torch.ones(3), k) for k in (1, 2, 300)])


@pytest.mark.parametrize("is_longer", [False, True], ids=["one_size", "any_size"])
def test_strides_that_change(is_longer: bool) -> None:
    torch.manual_seed(0)
    calls = [
        (torch.randn(6 + is_longer * k, width)[:, :WIDTH], 1.5) for k, width in enumerate((16, 24, 32, 40, 32, 8, 24))
    ]
    compiled = torch.compile(windows, backend=backend())
    for arguments in calls:
        torch.testing.assert_close(compiled(*arguments), windows(*arguments))
    same(windows, calls)


def untracked_head(x: Tensor, head: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits = F.linear(x, head)
    return F.cross_entropy(logits, y) + x.sum()


def untracked_gate(x: Tensor, head: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        gate = 1 + torch.erf(x / math.sqrt(2.0))
    return (0.5 * x * gate).sum()


def written_before_the_loss(x: Tensor, head: Tensor, y: Tensor) -> Tensor:
    hidden = x * 2
    logits = F.linear(hidden, head.detach())
    hidden.mul_(0.5)
    return F.cross_entropy(logits, y) + hidden.sum()


def written_inside_of_gelu(x: Tensor, head: Tensor, y: Tensor) -> Tensor:
    hidden = (x * 2).detach()
    gate = 1 + torch.erf(hidden / math.sqrt(2.0))
    hidden[:, 0] = 1.0
    return (0.5 * hidden * gate * x).sum()


@pytest.mark.parametrize("function", [untracked_head, untracked_gate, written_before_the_loss, written_inside_of_gelu])
def test_patterns_that_are_none(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    x, head, y = torch.randn(ROWS, WIDTH), torch.randn(CLASSES, WIDTH), torch.randint(CLASSES, (ROWS,))
    same(function, [(x, head, y)], rtol=1e-4, atol=1e-5)


def test_a_vectorized_function_outside_of_autocast() -> None:
    def rows(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.vmap(lambda row: row @ w)(x)

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(torch.compile(rows, backend=backend())(x, w), rows(x, w))


def test_a_gradient_of_an_input_that_is_returned() -> None:
    def unchanged(h: Tensor) -> tuple[Tensor, Tensor]:
        h = h.contiguous()
        return h, h.sin()

    h = torch.randn(3, requires_grad=True) * 2
    y, z = torch.compile(unchanged, backend=backend())(h)
    assert y is h
    torch.testing.assert_close(torch.autograd.grad(z.sum(), h)[0], h.cos())
