"""Recurrent layers as loops over time steps of any number, forward and backward, which ONNX has as `Scan`.

torch's decompositions of these layers trace each step, so that the length is a constant. The backward is written here,
since that of torch's `scan` traces the forward's step again.

Hochreiter and Schmidhuber 1997 (LSTM); Cho et al. 2014 (GRU, in torch's form); Elman 1990.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lit_ort._compat.torch_export import scan

# Of a time step: the gates of the input, those of the state, and the states before.
Step = Callable[[Tensor, Tensor, Sequence[Tensor]], "tuple[Tensor, ...]"]


@dataclass(frozen=True)
class LoopCell:
    """A recurrent layer's cell. Gates and states are float[batch, hidden], for the factors with the steps in front.

    Args:
        step: the new states, from the gates of the input and of the state, and the states before.
        factors: for all steps at once, what the gradients of a step are computed from: the same arguments as `step`,
            and the new states.
        gradients: the gradients of the states before but for the part that comes from the state's gates, of the
            input's gates, and of the state's gates; from the gradients of the new states, and the factors.
    """

    step: Step
    factors: Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
    gradients: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Tensor], Tensor, Tensor]]


def _lstm_gates(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    i, f, g, o = (x + h).chunk(4, -1)
    return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()


def _lstm(x: Tensor, h: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    i, f, g, o = _lstm_gates(x, h)
    cell = f * states[1] + i * g
    return o * cell.tanh(), cell


def _lstm_factors(x: Tensor, h: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return *_lstm_gates(x, h), before[1], after[1].tanh()


def _lstm_gradients(of_states: Sequence[Tensor], factors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor, Tensor]:
    (of_h, of_c), (i, f, g, o, before, tanh) = of_states, factors
    of_c = of_c + of_h * o * (1 - tanh * tanh)
    parts = (of_c * g * i * (1 - i), of_c * before * f * (1 - f), of_c * i * (1 - g * g), of_h * tanh * o * (1 - o))
    of_gates = torch.cat(parts, -1)
    return (torch.zeros_like(of_h), of_c * f), of_gates, of_gates


def _gru_gates(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (of_r, of_z, of_n), (r, z, n) = x.chunk(3, -1), h.chunk(3, -1)
    reset = (of_r + r).sigmoid()
    return reset, (of_z + z).sigmoid(), (of_n + reset * n).tanh(), n


def _gru(x: Tensor, h: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    _, update, new, _ = _gru_gates(x, h)
    return (new + update * (states[0] - new),)


def _gru_factors(x: Tensor, h: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return *_gru_gates(x, h), before[0]


def _gru_gradients(of_states: Sequence[Tensor], factors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor, Tensor]:
    (of_h,), (reset, update, new, of_new, before) = of_states, factors
    of_n = of_h * (1 - update) * (1 - new * new)
    of_r, of_z = of_n * of_new * reset * (1 - reset), of_h * (before - new) * update * (1 - update)
    return (of_h * update,), torch.cat((of_r, of_z, of_n), -1), torch.cat((of_r, of_z, of_n * reset), -1)


def _plain_factors(x: Tensor, h: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (after[0],)


def _tanh_gradients(of_states: Sequence[Tensor], factors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor, Tensor]:
    of_gates = of_states[0] * (1 - factors[0] * factors[0])
    return (torch.zeros_like(of_gates),), of_gates, of_gates


def _relu_gradients(of_states: Sequence[Tensor], factors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor, Tensor]:
    of_gates = torch.where(factors[0] > 0, of_states[0], 0.0)
    return (torch.zeros_like(of_gates),), of_gates, of_gates


# By the names of torch's functions.
LOOP_CELLS: Mapping[str, LoopCell] = MappingProxyType(
    {
        "lstm": LoopCell(_lstm, _lstm_factors, _lstm_gradients),
        "gru": LoopCell(_gru, _gru_factors, _gru_gradients),
        "rnn_tanh": LoopCell(lambda x, h, states: ((x + h).tanh(),), _plain_factors, _tanh_gradients),
        "rnn_relu": LoopCell(lambda x, h, states: ((x + h).relu(),), _plain_factors, _relu_gradients),
    }
)


class _Loop(torch.autograd.Function):
    """A cell in a loop over time steps: the last states, and float[length, batch, hidden] for each state.

    Nothing is sliced, since a slice of a short example can have one element, a size that would be a constant.
    """

    @staticmethod
    def forward(ctx: Any, cell: LoopCell, x: Tensor, weight: Tensor, bias: Tensor, *states: Tensor) -> Any:
        def step(*values: Tensor) -> list[Tensor]:
            *before, gates, weight, bias = values
            after = cell.step(gates, functional.linear(before[0], weight, bias), before)
            return [*after, *(state.clone() for state in (*after, *before))]

        # Copies, since a loop rejects a tensor that is passed twice.
        found = scan(step, [state.clone() for state in states], [x], (weight, bias))
        last, after, before = (tuple(found[k * len(states) : (k + 1) * len(states)]) for k in range(3))
        ctx.cell = cell
        ctx.save_for_backward(x, weight, bias, *after, *before)
        return *last, *after

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor) -> Any:
        cell: LoopCell = ctx.cell
        count = len(of_results) // 2
        x, weight, bias, *states = ctx.saved_tensors
        after, before = states[:count], states[count:]
        factors = cell.factors(x, functional.linear(before[0], weight, bias), before, after)

        def step(*values: Tensor) -> list[Tensor]:
            of_states, (*given, weight) = values[:count], values[count:]
            of_after = [a + b for a, b in zip(of_states, given[:count], strict=True)]
            (of_h, *others), of_x, of_gates = cell.gradients(of_after, given[count:])
            return [of_h + of_gates @ weight, *others, of_x.clone(), of_gates.clone()]

        backwards = [value.flip(0) for value in (*of_results[count:], *factors)]
        of_last = [value.clone() for value in of_results[:count]]
        *of_first, of_x, of_gates = scan(step, of_last, backwards, (weight,))
        of_x, of_gates = of_x.flip(0), of_gates.flip(0)
        of_weight = of_gates.flatten(0, 1).t() @ before[0].flatten(0, 1)
        return None, of_x, of_weight, of_gates.sum((0, 1)), *of_first


def recurrent_layer(
    name: str,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """One recurrent layer, without dropout: its output, and the last states.

    Args:
        name: of torch's function.
        x: float[batch, length, width], or float[length, batch, width] if not `batch_first`.
        states: float[directions, batch, hidden] for each state.
        weights: those of the input and of the state, and with `has_biases` their biases, for each direction.
    """
    cell, per_direction = LOOP_CELLS[name], 4 if has_biases else 2
    x = x.transpose(0, 1) if batch_first else x
    outputs, ends = [], []
    for k in range(2 if bidirectional else 1):
        of_input, of_state, *biases = weights[k * per_direction : (k + 1) * per_direction]
        gates = functional.linear(x.flip(0) if k else x, of_input, biases[0] if biases else None)
        bias = biases[1] if biases else torch.zeros_like(of_state[:, 0])
        found = _Loop.apply(cell, gates, of_state, bias, *(state[k] for state in states))
        last, (output, *_) = found[: len(states)], found[len(states) :]
        outputs.append(output.flip(0) if k else output)
        ends.append(last)
    output = torch.cat(outputs, -1)
    last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return (output.transpose(0, 1) if batch_first else output, *last)
