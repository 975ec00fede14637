"""Recurrent layers as loops: values and gradients of torch's layers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from lit_ort.export.recurrent_scans import LOOP_CELLS, recurrent_layer

KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **settings: nn.RNN(*sizes, nonlinearity="relu", **settings),
}
FLAGS = list(itertools.product((False, True), repeat=3))


def test_every_cell_is_tested() -> None:
    assert KINDS.keys() == LOOP_CELLS.keys()


@pytest.mark.parametrize(("bias", "bidirectional", "batch_first"), FLAGS)
@pytest.mark.parametrize("name", KINDS)
def test_values_and_gradients_are_those_of_torch(name: str, bias: bool, bidirectional: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = KINDS[name](5, 4, bias=bias, bidirectional=bidirectional, batch_first=batch_first).double()
    x = torch.randn(3, 6, 5, dtype=torch.double, requires_grad=True)
    shape = 2 if bidirectional else 1, 3 if batch_first else 6, 4
    states = [torch.randn(shape, dtype=torch.double, requires_grad=True) for _ in range(2 if name == "lstm" else 1)]
    output, last = layer(x, tuple(states) if name == "lstm" else states[0])
    expected = output, *(last if name == "lstm" else [last])
    weights = list(layer.parameters())
    found = recurrent_layer(name, x, states, weights, bias, bidirectional, batch_first)
    torch.testing.assert_close(found, expected)
    incoming = [torch.randn_like(value) for value in expected]
    inputs = [x, *states, *weights]
    gradients = torch.autograd.grad(found, inputs, incoming)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs, incoming))
