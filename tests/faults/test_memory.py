"""Memory that torch and ONNX Runtime share: what a caller holds stays as it was, whatever else runs and goes."""

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

# Below and above the size from which results lie in the pool; the last ones change in size.
SHAPES = [(3, 5), (40, 64), (600, 512), (700, 512), (901, 512)]
STEPS = 400


def results(x: Tensor) -> tuple[Tensor, ...]:
    """Values, views of them, a view of the input, and a sum."""
    hidden = F.gelu(x) * 2
    wide = torch.cat([hidden, x.exp()], 1)
    return hidden, hidden.t(), wide[:, ::2], x[1:], wide.sum(), torch.softmax(wide, 1).unflatten(1, (2, -1))


@dataclass
class Held:
    """A result, and what it was when it came."""

    value: Tensor
    copy: Tensor

    def is_intact(self) -> bool:
        return torch.equal(self.value.detach(), self.copy)


class Program:
    """Calls, drops, in-place writes, views and backward runs in an order that follows from a seed."""

    def __init__(self, step: Callable[[Tensor], tuple[Tensor, ...]], seed: int) -> None:
        self._step, self._draw = step, random.Random(seed)
        self._held: list[Held] = []
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
        found, expected = self._step(x), results(x)
        for k, (value, reference) in enumerate(zip(found, expected, strict=True)):
            if not torch.allclose(value, reference, rtol=1e-4, atol=1e-5):
                self.wrong.append(f"result {k} of {tuple(x.shape)} differs from eager's")
            if self._draw.random() < 0.4:
                self._held.append(Held(value, value.detach().clone()))

    def _drop(self) -> None:
        self._draw.shuffle(self._held)
        del self._held[self._draw.randint(0, 12) :]

    def _write(self) -> None:
        """Through one result, which may be seen through its own views and through nothing else."""
        if not self._held:
            return
        written = self._draw.choice(self._held)
        place = written.value.untyped_storage().data_ptr()
        written.value.detach().add_(1)
        for held in self._held:
            if held.value.untyped_storage().data_ptr() == place:
                held.copy = held.value.detach().clone()

    def _view(self) -> None:
        """Of a result that is dropped itself."""
        if self._held:
            held = self._held.pop(self._draw.randrange(len(self._held)))
            view = held.value.flatten()[::3] if held.value.dim() else held.value.view(1)
            self._held.append(Held(view, view.detach().clone()))

    def _differentiate(self) -> None:
        x = self._input().requires_grad_()
        hidden, *_, total, _ = self._step(x)
        (gradient,) = torch.autograd.grad(total, x)
        twin = x.detach().requires_grad_()
        (expected,) = torch.autograd.grad(results(twin)[4], twin)
        if not torch.allclose(gradient, expected, rtol=1e-4, atol=1e-5):
            self.wrong.append(f"the gradient at {tuple(x.shape)} differs from eager's")
        self._held.append(Held(gradient, gradient.clone()))
        # The graph behind it stays, with what it saved, until this goes.
        self._held.append(Held(hidden, hidden.detach().clone()))

    def _check(self, number: int) -> None:
        if not all(held.is_intact() for held in self._held):
            self.wrong.append(f"at {number} a result that is held has changed")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_what_is_held_stays_as_it_was(seed: int) -> None:
    program = Program(compiled(results), seed)
    program.run()
    assert not program.wrong


@pytest.mark.slow
def test_threads_that_share_a_graph() -> None:
    step = compiled(results)
    for shape in SHAPES:
        for wants_gradient in (False, True):
            # Compiled here: threads compile one after the other.
            step(torch.zeros(shape, requires_grad=wants_gradient))
    programs = [Program(step, seed) for seed in (10, 11)]
    threads = [threading.Thread(target=program.run) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [program.wrong for program in programs] == [[], []]
