"""Ints that change and are sizes, bounds or places: one graph for all of their values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.compare import SINCE_2_15, backend

WEIGHT = torch.linspace(-1, 1, 200).reshape(5, 40)


def written(x: Tensor, n: int) -> Tensor:
    y, z = x.tanh(), torch.zeros_like(x)
    z[:, :n] = y[:, :n]
    z[1, n] = 2.0
    z[..., n + 1] = y[:, 0]
    return z * 2


# Uses of an int for x: float[4, 40].
USES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "end": lambda x, n: x[:, :n] * 2,
    "crop": lambda x, n: x[:, n : n + 8].tanh(),
    "crop of two dimensions": lambda x, n: x[n % 3 :, n : n + 8].tanh(),
    "narrow": lambda x, n: x.narrow(1, n, 8).tanh(),
    "last": lambda x, n: x[:, -n:] * 2,
    "without the last": lambda x, n: x[:, :-n] * 2,
    "parts": lambda x, n: torch.cat([x[:, :n], x[:, n:].flip(0)], 1) * 2,
    "split": lambda x, n: x.split([n, x.size(1) - n], 1)[0].tanh(),
    "written": written,
    "zeros": lambda x, n: torch.zeros(n, 4).add(x.mean()),
    "ones beside": lambda x, n: torch.cat([x, torch.ones(x.size(0), n)], 1).tanh(),
    "arange": lambda x, n: x.mean() * torch.arange(n, n + 10).float(),
    "full": lambda x, n: x.mean() * torch.full((n,), 3.0),
    "eye": lambda x, n: torch.eye(n) * x.mean(),
    "mask of a triangle": lambda x, n: torch.triu(torch.full((n, n), float("-inf")), 1).softmax(1).mul(x.mean()),
    "diagonal of a triangle": lambda x, n: x.tril(n) * 2,
    "repeat": lambda x, n: x.repeat(n, 1) * 2,
    "expand": lambda x, n: x[:, :1].expand(-1, n).tanh(),
    "pad": lambda x, n: functional.pad(x, (n, n), value=1.0).tanh(),
    "topk": lambda x, n: x.topk(n, 1).values * 2,
    "roll": lambda x, n: x.roll(n, 1) + x.roll(-n, 1),
    "interpolate": lambda x, n: functional.interpolate(x[:, None], size=n).tanh(),
    "linear": lambda x, n: functional.linear(x[:, :n], WEIGHT[:, :n]).tanh(),
    "view": lambda x, n: x[:, : 2 * n].reshape(x.size(0), n, 2).sum(1).tanh(),
    "softmax": lambda x, n: x[:, :n].softmax(1) * 2,
    "indices": lambda x, n: x[:, torch.arange(n)].tanh(),
    "place": lambda x, n: x.mT[n] + x[..., n] * x[n % 4, n] - x[None, :, -n - 1],
    "rounded": lambda x, n: x[:, : int(n * 0.75)].tanh(),
    "in arithmetic too": lambda x, n: x[:, :n].tanh() * (1 - n / 100) + n,
}
VALUES = (5, 6, 7, 9, 12, 15, 4)
# One value, all from the second on, and those for which a condition of the second one fails.
GRAPHS = {"crop of two dimensions": 4}


def compare(step: Callable[..., Tensor], compiled: Callable[..., Tensor], *numbers: Any) -> None:
    x = torch.linspace(-2, 3, 160).reshape(4, 40).sin()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual, expected = compiled(a, *numbers), step(b, *numbers)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), a), torch.autograd.grad(expected.sum(), b))


@pytest.mark.parametrize("name", USES)
def test_one_graph_for_all_values(name: str) -> None:
    engine = backend()
    compiled = torch.compile(USES[name], backend=engine)
    for value in VALUES:
        compare(USES[name], compiled, value)
    assert engine.count <= GRAPHS.get(name, 2)


@pytest.mark.parametrize("name", ["end", "parts", "written", "zeros", "repeat", "linear", "place", "in arithmetic too"])
def test_values_that_broadcast(name: str) -> None:
    engine = backend()
    compiled = torch.compile(USES[name], backend=engine)
    for value in (5, 6, 1, 0, 7, 1, 0, 2):
        if value or name not in ("zeros", "repeat"):
            compare(USES[name], compiled, value)
    assert engine.count <= 5


def test_a_size_that_is_computed_from_a_float() -> None:
    def step(x: Tensor, ratio: float) -> Tensor:
        return x[:, : int(x.size(1) * ratio)].tanh() * ratio

    engine = backend()
    compiled = torch.compile(step, backend=engine)
    for ratio in (0.2, 0.3, 0.75, 0.5, 0.9):
        compare(step, compiled, ratio)
    assert engine.count == 2


def test_recompiles_name_the_numbers() -> None:
    engine = backend()
    compiled = torch.compile(lambda x, n: x[:, n : n + 8] * 2, backend=engine)
    for value in (5, 6, 1):
        compiled(torch.ones(4, 40), value)
    assert engine.compile_log.recompiles[-1].reason == "sizes or numbers are now 1."


def test_negative_numbers() -> None:
    def step(x: Tensor, shift: int) -> Tensor:
        return x.roll(shift, 1) * torch.arange(40)

    engine = backend()
    compiled = torch.compile(step, backend=engine)
    for shift in (2, 3, 4, -3, 5, -3, 4):
        compare(step, compiled, shift)
    # One value, all of at least 2, and then each value, as keys.
    assert engine.count == 5


def test_a_number_that_torch_needs_as_a_constant() -> None:
    def step(x: Tensor, power: int) -> Tensor:
        return x.pow(power)

    engine = backend()
    compiled = torch.compile(step, backend=engine)
    for power in (2, 3, 4, 5, 3, 4, 5):
        compare(step, compiled, power)
    # What was compiled for 3 was for all values, and is not kept. Since torch 2.15 exponents are symbolic.
    assert engine.count == (2 if SINCE_2_15 else 5)


class Mixed(nn.Module):
    """CutMix as vision libraries write it."""

    def forward(self, x: Tensor, ratio: float, place: int) -> Tensor:
        size = x.size(1)
        cut = int(size * np.sqrt(1 - ratio))
        start, end = np.clip(place - cut // 2, 0, size), np.clip(place + cut // 2, 0, size)
        x = x.clone()
        x[:, start:end] = x.flip(0)[:, start:end]
        return x.tanh() * (1 - (end - start) / size)


def test_cut_and_mix() -> None:
    engine, module = backend(), Mixed()
    compiled = torch.compile(module, backend=engine)
    draws = random.Random(3)
    for _ in range(12):
        compare(module, compiled, draws.uniform(0.3, 0.9), draws.randint(8, 30))
    assert engine.count <= 4


def test_a_queue() -> None:
    """A queue of earlier rows, as of contrastive losses, with a place that moves on."""

    def step(x: Tensor, queue: Tensor, place: int) -> tuple[Tensor, int]:
        result = x @ queue.clone().T
        with torch.no_grad():
            queue[place : place + len(x)] = x.detach()
        return result, (place + len(x)) % 16

    engine, queue, place = backend(), torch.ones(16, 40), 0
    compiled, twin = torch.compile(step, backend=engine), torch.ones(16, 40)
    for _ in range(8):
        x = torch.randn(4, 40, requires_grad=True)
        (actual, after), (expected, place) = compiled(x, queue, place), step(x, twin, place)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(queue, twin)
        assert after == place
    assert engine.count == 3
