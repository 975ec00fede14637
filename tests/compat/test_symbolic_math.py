"""Functions of numbers that change, in one graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.compare import backend

STEPS: dict[str, Callable[[Tensor, float], Any]] = {
    "math.exp": lambda x, n: x * math.exp(-n),
    "math.log": lambda x, n: x * math.log(n + 1),
    "math.cos": lambda x, n: x * math.cos(math.pi * n / 9),
    "np.exp": lambda x, n: x * (2 / (1 + np.exp(-10 * n)) - 1),
    "np.cos": lambda x, n: x * np.cos(np.pi * n / 9),
    "np.arctan": lambda x, n: x - np.arctan(n),
    "np.sqrt": lambda x, n: x * np.sqrt(n) * min(1.0, np.exp(n - 2)),
    "np.clip": lambda x, n: x * np.clip(n / 2, 0.3, 1),
    "np.minimum": lambda x, n: x * np.minimum(n, 1.2) + np.maximum(1, n),
    "np.clip of an integer": lambda x, n: x[:, : np.clip(int(n * 4), 2, 3)] * 2,
    "a tensor of np.clip": lambda x, n: (x, torch.tensor(1 - np.clip(n, 0, 2) * 3 / 4)),
    "a tensor of an integer of np.clip": lambda x, n: (x, torch.tensor(np.clip(int(n * 8), 2, 9))),
    "a tensor of a quotient": lambda x, n: (x, torch.tensor(np.clip(int(n * 8), 2, 9) / 2)),
    "a tensor of Python's int": lambda x, n: (x, torch.tensor(int(np.clip(int(n * 8), 2, 9)) / 2)),
    "a literal of NumPy's": lambda x, n: (x * (n * np.float64(0.5)), torch.tensor(n * np.float64(0.5))),
    "a bound with a literal of NumPy's": lambda x, n: x[:, : int(n * 4) - np.int64(1) + np.int64(3)] * 2,
    "an integer of a number": lambda x, n: (x * int(np.int64(n * 4)), torch.tensor(np.int64(n * 4))),
    "an integer": lambda x, n: x * math.exp(int(n * 4) / 8),
    "a tensor of NumPy's": lambda x, n: (x, torch.tensor(0.5 * np.exp(n))),
    "a tensor of Python's": lambda x, n: (x, torch.tensor(float(np.exp(n))), torch.tensor(math.exp(n))),
}
# In the others the first value is a constant.
GRAPHS = {"a bound with a literal of NumPy's": 1}
VALUES = (0.5, 1.0, 1.5, 2.0, 0.25, 3.0)


@pytest.mark.parametrize("name", STEPS)
def test_functions(name: str) -> None:
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(STEPS[name], backend=backend())
    for value in VALUES:
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x, value), STEPS[name](x, value))
    assert counters["stats"]["unique_graphs"] == GRAPHS.get(name, 2)


def test_a_branch_on_a_function() -> None:
    def step(x: Tensor, n: float) -> Tensor:
        return x * 2 if math.exp(n) > 3 else x - math.log(n)

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(step, backend=backend())
    for value in VALUES:
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x, value), step(x, value))
    assert counters["stats"]["unique_graphs"] == 3


LAYER = torch.nn.Linear(4, 4)


def recorded(x: Tensor, n: int) -> Tensor:
    with torch.set_grad_enabled(n >= 7):
        return LAYER(x)


def frozen(x: Tensor, n: int) -> Tensor:
    LAYER.requires_grad_(n >= 7)
    return LAYER(x)


CONDITIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a mode": recorded,
    "parameters": frozen,
    "requires_grad_": lambda x, n: (x * 2).requires_grad_(n >= 7) * 3,
    "an argument": lambda x, n: x.sort(1, descending=n >= 7).values[:, 0] * 2,
    "a key": lambda x, n: {True: x, False: x * 2}[n >= 7] + 1,
    "a factor": lambda x, n: x * (n >= 7),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_that_torch_needs_as_a_constant(name: str) -> None:
    torch.compiler.reset()
    engine = backend(fallback="warn")
    compiled = torch.compile(CONDITIONS[name], backend=engine)
    for value in (5, 6, 7, 9, 12, 3):
        x = torch.randn(3, 4)
        actual = compiled(x, value)
        expected = CONDITIONS[name](x, value)
        torch.testing.assert_close(actual, expected)
        assert actual.requires_grad == expected.requires_grad
    assert engine.count <= 4
    assert all(graph.kind != "eager" for graph in engine.compile_log.graphs)
