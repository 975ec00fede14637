"""Draws from a `random.Random` of a module's own, at each call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compare import backend
from tests.compat.canary import canary

DRAWS: dict[str, Callable[[random.Random], Any]] = {
    "random": lambda rng: rng.random(),
    "randint": lambda rng: rng.randint(0, 9),
    "randrange": lambda rng: rng.randrange(3, 30, 2),
    "uniform": lambda rng: rng.uniform(-1, 1),
    "two": lambda rng: rng.random() - rng.random(),
    "choice": lambda rng: rng.choice([1.0, 2.0, 3.0]),
    "state": lambda rng: rng.getstate()[1][0] % 7,
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws(name: str) -> None:
    with canary("RandomVariable.call_method", "random_objects", "each call draws the numbers of the trace"):
        torch.compiler.reset()
        draw, generators = DRAWS[name], (random.Random(5), random.Random(5))
        mine, eagers = generators

        def step(x: Tensor, rng: random.Random) -> Tensor:
            return x * draw(rng)

        compiled = torch.compile(step, backend=backend(fallback="warn"))
        for _ in range(6):
            x = torch.randn(4)
            torch.testing.assert_close(compiled(x, mine), step(x, eagers))
        assert mine.getstate() == eagers.getstate()
        # Another object with another state.
        x = torch.randn(4)
        torch.testing.assert_close(compiled(x, random.Random(8)), step(x, random.Random(8)))


def test_a_branch_on_a_draw() -> None:
    torch.compiler.reset()
    mine, eagers = random.Random(0), random.Random(0)

    def step(x: Tensor, rng: random.Random) -> Tensor:
        return x * 2 if rng.random() < 0.5 else x - 1

    compiled = torch.compile(step, backend=backend(fallback="warn"))
    for _ in range(12):
        x = torch.randn(4)
        torch.testing.assert_close(compiled(x, mine), step(x, eagers))
