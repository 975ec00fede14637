"""Scans that torch's operator computes on GPUs become plain operators, whose gradients are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lit_ort._compat.torch_functorch import ASSOCIATIVE_SCAN
from lit_ort.backend.backend import ORTBackend
from lit_ort.errors import LitOrtWarning
from tests.compare import backend, relative_error


def scanned(decays: Tensor, inputs: Tensor) -> Tensor:
    """The operator itself, which `torch.associative_scan` calls for tensors of a GPU only."""

    def combine(decay: Tensor, state: Tensor, next_decay: Tensor, next_state: Tensor) -> list[Tensor]:
        return [decay * next_decay, next_decay * state + next_state]

    return ASSOCIATIVE_SCAN(combine, [decays, inputs], ())[1]


def looped(decays: Tensor, inputs: Tensor) -> Tensor:
    state, states = torch.zeros_like(inputs[0]), []
    for decay, value in zip(decays, inputs, strict=True):
        state = decay * state + value
        states.append(state)
    return torch.stack(states)


def assert_right(step: Callable[..., Tensor], engine: ORTBackend, length: int) -> None:
    decays = torch.rand(length, 3, 4, requires_grad=True)
    inputs, weights = torch.randn(length, 3, 4, requires_grad=True), torch.randn(length, 3, 4)
    loss = torch.compile(step, backend=engine)(decays, inputs, weights)
    expected = (looped(decays, inputs) * weights).sum()
    assert relative_error(loss.detach(), expected.detach()) < 1e-5
    for variable in (decays, inputs):
        pair = (torch.autograd.grad(value, variable, retain_graph=True)[0] for value in (loss, expected))
        assert relative_error(*pair) < 1e-5


@pytest.mark.parametrize("length", [2, 7, 8])
def test_losses_and_gradients_are_those_of_a_loop(length: int) -> None:
    engine = backend()
    assert_right(lambda decays, inputs, weights: (scanned(decays, inputs) * weights).sum(), engine, length)
    (graph,) = engine.compile_log.graphs
    assert graph.kind == "fused"


def test_a_fallback_has_right_gradients_too() -> None:
    table = torch.randn(5, 4, requires_grad=True)

    def step(decays: Tensor, inputs: Tensor, weights: Tensor) -> Tensor:
        rows = functional.embedding(torch.tensor([1, 3]), table, sparse=True)
        return (scanned(decays, inputs) * weights).sum() + 0 * rows.sum()

    engine = backend(fallback="warn")
    with pytest.warns(LitOrtWarning, match="sparse"):
        assert_right(step, engine, 7)
