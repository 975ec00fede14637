"""GRU and plain recurrent layers beside torch's, results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lit_ort.ops import OPERATORS
from tests.ops.helpers import RecordingMemory

layer_of = torch.ops.lit_ort.recurrent_layer
MODES = ["gru", "tanh", "relu"]
LENGTH, BATCH, WIDTH, HIDDEN = 5, 3, 4, 6


def twin(mode: str, biases: bool, dtype: torch.dtype = torch.float64) -> nn.RNNBase:
    """torch's module for a mode."""
    if mode == "gru":
        return nn.GRU(WIDTH, HIDDEN, bias=biases, dtype=dtype)
    return nn.RNN(WIDTH, HIDDEN, nonlinearity=mode, bias=biases, dtype=dtype)


def arguments(module: nn.RNNBase, mode: str, reverse: bool, length: int = LENGTH) -> tuple[Any, ...]:
    """What the operator is called with, all of it tracked."""
    weights = list(module.parameters())
    x = torch.randn(length, BATCH, WIDTH, dtype=weights[0].dtype, requires_grad=True)
    state = torch.randn(1, BATCH, HIDDEN, dtype=weights[0].dtype, requires_grad=True)
    return (x, state, *weights, *([None] * (4 - len(weights))), mode, reverse)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("length", [1, LENGTH])
def test_as_torch(mode: str, biases: bool, reverse: bool, length: int) -> None:
    module = twin(mode, biases)
    given = arguments(module, mode, reverse, length)
    tracked = [argument for argument in given if isinstance(argument, torch.Tensor)]
    x, state = given[:2]
    expected, last = module(x.flip(0) if reverse else x, state)
    expected = expected.flip(0) if reverse else expected
    actual, _ = layer_of(*given)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual[:1] if reverse else actual[-1:], last)
    weight = torch.randn_like(expected)
    found = torch.autograd.grad((actual * weight).sum(), tracked)
    for own, reference in zip(found, torch.autograd.grad((expected * weight).sum(), tracked), strict=True):
        torch.testing.assert_close(own, reference)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_gradcheck_and_opcheck(mode: str) -> None:
    given = arguments(twin(mode, True), mode, False)
    assert torch.autograd.gradcheck(lambda *args: layer_of(*args, mode, False)[0], given[:-2])
    torch.library.opcheck(layer_of.default, given)
    torch.library.opcheck(layer_of.default, (given[0].transpose(0, 1).contiguous().transpose(0, 1), *given[1:-1], True))
    plain = [value.detach() if isinstance(value, torch.Tensor) else value for value in given]
    output, gates = layer_of(*plain)
    for wants_x in (True, False):
        saved = (torch.randn_like(output), *plain[:4], output, gates, mode, False, wants_x)
        torch.library.opcheck(torch.ops.lit_ort.recurrent_layer_backward.default, saved)


@pytest.mark.parametrize("mode", MODES)
def test_results_lie_in_the_given_memory(mode: str) -> None:
    memory = RecordingMemory()
    given = [
        value.detach() if isinstance(value, torch.Tensor) else value
        for value in arguments(twin(mode, True), mode, False)
    ]
    output, gates = OPERATORS[layer_of.default].kernel(memory, *given)
    assert memory.holds(output)
    assert memory.holds(gates)
    backward = OPERATORS[torch.ops.lit_ort.recurrent_layer_backward.default]
    found = backward.kernel(memory, torch.randn_like(output), *given[:4], output, gates, mode, False, True)
    assert all(memory.holds(gradient) for gradient in found[:4])
    assert not any(gradient.isnan().any() for gradient in found)


def test_an_input_without_a_gradient_costs_no_product() -> None:
    given = arguments(twin("gru", True), "gru", False)
    output, _ = layer_of(given[0].detach(), *given[1:])
    output.sum().backward()
    assert given[0].grad is None
    assert given[1].grad is not None
