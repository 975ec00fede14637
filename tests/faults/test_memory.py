"""Memory that torch and ONNX Runtime share: results that a caller keeps are never overwritten."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compare import compiled

# Below and above the size from which results are in the pool; dimensions vary.
SHAPES = [(3, 5), (40, 64), (600, 512), (700, 512), (901, 512)]
STEPS = 150


def results(x: Tensor) -> tuple[Tensor, ...]:
    """Tensors, views of them, a view of the input, and a sum."""
    hidden = F.gelu(x) * 2
    wide = torch.cat([hidden, x.exp()], 1)
    return hidden, hidden.t(), wide[:, ::2], x[1:], wide.sum(), torch.softmax(wide, 1).unflatten(1, (2, -1))


@dataclass
class KeptResult:
    """A result, and a copy of its value."""

    value: Tensor
    copy: Tensor

    def is_intact(self) -> bool:
        return torch.equal(self.value.detach(), self.copy)


class Program:
    """Calls a step, drops and changes results, takes views and runs backwards, in an order that depends on a seed."""

    def __init__(self, step: Callable[[Tensor], tuple[Tensor, ...]], seed: int) -> None:
        self._step, self._draw = step, random.Random(seed)
        self._results: list[KeptResult] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        actions = [self._call, self._call, self._drop, self._drop, self._write, self._view, self._differentiate]
        for number in range(STEPS):
            self._draw.choice(actions)()
            if number % 20 == 0:
                self._check(number)
            if number % 97 == 0:
                gc.collect()
        self._check(STEPS)

    def _input(self) -> Tensor:
        shape = self._draw.choice(SHAPES)
        start = self._draw.random()
        return torch.linspace(start - 1, start, shape[0] * shape[1]).reshape(shape)

    def _call(self) -> None:
        x = self._input()
        actual, expected = self._step(x), results(x)
        for k, (value, reference) in enumerate(zip(actual, expected, strict=True)):
            if not torch.allclose(value, reference, rtol=1e-4, atol=1e-5):
                self.wrong.append(f"result {k} of {tuple(x.shape)} differs from eager's")
            if self._draw.random() < 0.4:
                self._results.append(KeptResult(value, value.detach().clone()))

    def _drop(self) -> None:
        self._draw.shuffle(self._results)
        del self._results[self._draw.randint(0, 12) :]

    def _write(self) -> None:
        """Changes one result in place, which must change its views and no other result."""
        if not self._results:
            return
        target = self._draw.choice(self._results)
        address = target.value.untyped_storage().data_ptr()
        target.value.detach().add_(1)
        for result in self._results:
            if result.value.untyped_storage().data_ptr() == address:
                result.copy = result.value.detach().clone()

    def _view(self) -> None:
        """Replaces a result by a view of it."""
        if self._results:
            value = self._results.pop(self._draw.randrange(len(self._results))).value
            view = value.flatten()[::3] if value.dim() else value.view(1)
            self._results.append(KeptResult(view, view.detach().clone()))

    def _differentiate(self) -> None:
        x = self._input().requires_grad_()
        hidden, *_, total, _ = self._step(x)
        (gradient,) = torch.autograd.grad(total, x)
        twin = x.detach().requires_grad_()
        (expected,) = torch.autograd.grad(results(twin)[4], twin)
        if not torch.allclose(gradient, expected, rtol=1e-4, atol=1e-5):
            self.wrong.append(f"the gradient at {tuple(x.shape)} differs from eager's")
        self._results.append(KeptResult(gradient, gradient.clone()))
        # This result keeps its autograd graph and the saved tensors alive.
        self._results.append(KeptResult(hidden, hidden.detach().clone()))

    def _check(self, number: int) -> None:
        if not all(result.is_intact() for result in self._results):
            self.wrong.append(f"a kept result has changed at action {number}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 5))])
def test_kept_results_do_not_change(seed: int) -> None:
    program = Program(compiled(results), seed)
    program.run()
    assert not program.wrong


@pytest.mark.slow
def test_threads_that_share_a_graph() -> None:
    step = compiled(results)
    for shape in SHAPES:
        for requires_grad in (False, True):
            # Compile before the threads start.
            step(torch.zeros(shape, requires_grad=requires_grad))
    programs = [Program(step, seed) for seed in (10, 11)]
    threads = [threading.Thread(target=program.run) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [program.wrong for program in programs] == [[], []]
