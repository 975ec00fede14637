"""Results and gradients of GRU and plain RNN layers, compared with torch's."""

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
    """Torch's module for a mode."""
    if mode == "gru":
        return nn.GRU(WIDTH, HIDDEN, bias=biases, dtype=dtype)
    return nn.RNN(WIDTH, HIDDEN, nonlinearity=mode, bias=biases, dtype=dtype)


def arguments(module: nn.RNNBase, mode: str, reverse: bool, length: int = LENGTH) -> tuple[Any, ...]:
    """The arguments of the operator; all tensors require grad."""
    weights = list(module.parameters())
    x = torch.randn(length, BATCH, WIDTH, dtype=weights[0].dtype, requires_grad=True)
    state = torch.randn(1, BATCH, HIDDEN, dtype=weights[0].dtype, requires_grad=True)
    return (x, state, *weights, *([None] * (4 - len(weights))), mode, reverse)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("length", [1, LENGTH])
def test_matches_torch(mode: str, biases: bool, reverse: bool, length: int) -> None:
    module = twin(mode, biases)
    args = arguments(module, mode, reverse, length)
    leaves = [argument for argument in args if isinstance(argument, torch.Tensor)]
    x, state = args[:2]
    expected, last = module(x.flip(0) if reverse else x, state)
    expected = expected.flip(0) if reverse else expected
    actual, _ = layer_of(*args)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual[:1] if reverse else actual[-1:], last)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((actual * weight).sum(), leaves)
    for gradient, reference in zip(gradients, torch.autograd.grad((expected * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(gradient, reference)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_gradcheck_and_opcheck(mode: str) -> None:
    args = arguments(twin(mode, True), mode, False)
    assert torch.autograd.gradcheck(lambda *tensors: layer_of(*tensors, mode, False)[0], args[:-2])
    torch.library.opcheck(layer_of.default, args)
    torch.library.opcheck(layer_of.default, (args[0].transpose(0, 1).contiguous().transpose(0, 1), *args[1:-1], True))
    detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
    output, gates = layer_of(*detached)
    for wants_x in (True, False):
        backward_args = (torch.randn_like(output), *detached[:4], output, gates, mode, False, wants_x)
        torch.library.opcheck(torch.ops.lit_ort.recurrent_layer_backward.default, backward_args)


@pytest.mark.parametrize("mode", MODES)
def test_results_use_the_given_memory(mode: str) -> None:
    memory = RecordingMemory()
    args = [
        value.detach() if isinstance(value, torch.Tensor) else value
        for value in arguments(twin(mode, True), mode, False)
    ]
    output, gates = OPERATORS[layer_of.default].kernel(memory, *args)
    assert memory.contains(output)
    assert memory.contains(gates)
    backward = OPERATORS[torch.ops.lit_ort.recurrent_layer_backward.default]
    gradients = backward.kernel(memory, torch.randn_like(output), *args[:4], output, gates, mode, False, True)
    assert all(memory.contains(gradient) for gradient in gradients[:4])
    assert not any(gradient.isnan().any() for gradient in gradients)


def test_an_input_that_requires_no_grad_has_no_gradient() -> None:
    args = arguments(twin("gru", True), "gru", False)
    output, _ = layer_of(args[0].detach(), *args[1:])
    output.sum().backward()
    assert args[0].grad is None
    assert args[1].grad is not None
