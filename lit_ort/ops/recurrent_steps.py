"""Recurrent layers by torch's operators, several for each time step: for dtypes and CPUs that have no machine code."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from lit_ort.kernels.recurrent_arguments import CELLS, Layer, LayerGradients


def forward(layer: Layer) -> None:
    """Computes what a layer saves and its output, in place."""
    kind = CELLS[layer.mode]
    steps = _steps(layer, layer.reverse)
    for step, earlier in zip(steps, [None, *steps], strict=False):
        state, cell = _before(layer, step, earlier)
        matmuls = linear(state, layer.weight, layer.bias).chunk(kind.gates, 1)
        inputs = _inputs(layer, step).chunk(kind.gates, 1)
        output = _rows(layer, layer.output, step)
        blocks = _kept(layer, step)
        if cell is not None:
            i, f, g, o = (torch.add(*parts, out=block) for *parts, block in zip(inputs, matmuls, blocks, strict=False))
            cell = torch.mul(f.sigmoid_(), cell, out=blocks[4]).addcmul_(i.sigmoid_(), g.tanh_())
            torch.mul(o.sigmoid_(), cell.tanh(), out=output)
        elif layer.mode == "gru":
            reset, update, part, new = blocks
            torch.add(inputs[0], matmuls[0], out=reset).sigmoid_()
            torch.add(inputs[1], matmuls[1], out=update).sigmoid_()
            torch.addcmul(inputs[2], reset, matmuls[2], out=new).tanh_()
            part.copy_(matmuls[2])
            torch.lerp(new, state, update, out=output)
        else:
            torch.add(inputs[0], matmuls[0], out=output)
            output.tanh_() if layer.mode == "tanh" else output.relu_()


def backward(layer: Layer, gradients: LayerGradients) -> None:
    """Computes the gradients of a layer's gates and of its first state, in place."""
    kind = CELLS[layer.mode]
    steps = _steps(layer, not layer.reverse)
    for step, earlier in zip(steps, [*steps[1:], None], strict=True):
        grad, gates = _rows(layer, gradients.grad, step), _rows(layer, gradients.gates, step)
        of_state = gradients.state[: len(grad)].add_(grad)
        before, cell_before = _before(layer, step, earlier)
        kept = _kept(layer, step)
        results = gates.chunk(kind.gradients, 1)
        if gradients.cell is not None and cell_before is not None:
            _lstm(kept, cell_before, of_state, gradients.cell[: len(grad)], results)
            torch.mm(gates, layer.weight, out=of_state)
        elif layer.mode == "gru":
            _gru(kept, before, of_state, results)
            matmuls = torch.cat((results[1], results[2], results[0]), 1)
            of_state.mul_(kept[1]).addmm_(matmuls, layer.weight)
        else:
            of_sum = _of_tanh(of_state, kept[0]) if layer.mode == "tanh" else of_state.masked_fill(kept[0] <= 0, 0)
            torch.mm(results[0].copy_(of_sum), layer.weight, out=of_state)


def _rows(layer: Layer, tensor: torch.Tensor, step: int) -> torch.Tensor:
    """The rows of a step."""
    if layer.packed is None:
        return tensor[step]
    return tensor.narrow(0, layer.packed.starts[step], layer.packed.rows[step])


def _inputs(layer: Layer, step: int) -> torch.Tensor:
    """The matmuls of a step with the input, and their bias."""
    assert layer.matmuls is not None
    matmuls = _rows(layer, layer.matmuls, step)
    return matmuls if layer.input_bias is None else matmuls + layer.input_bias


def _kept(layer: Layer, step: int) -> tuple[torch.Tensor, ...]:
    """The blocks that a step saves; of a plain layer, its output."""
    if layer.saved is None:
        return (_rows(layer, layer.output, step),)
    return _rows(layer, layer.saved, step).chunk(CELLS[layer.mode].saved, 1)


def _before(layer: Layer, step: int, earlier: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state and an LSTM's cell before a step: those of an earlier step, or the first ones of rows that begin."""
    if earlier is None:
        rows = len(layer.state) if layer.packed is None else layer.packed.rows[step]
        return layer.state[:rows], None if layer.cell is None else layer.cell[:rows]
    state = _continued(layer, _rows(layer, layer.output, earlier), layer.state, step)
    if layer.cell is None:
        return state, None
    return state, _continued(layer, _kept(layer, earlier)[4], layer.cell, step)


def _continued(layer: Layer, earlier: torch.Tensor, first: torch.Tensor, step: int) -> torch.Tensor:
    if layer.packed is None:
        return earlier
    rows = layer.packed.rows[step]
    return earlier[:rows] if rows <= len(earlier) else torch.cat((earlier, first[len(earlier) : rows]))


def _lstm(
    kept: tuple[torch.Tensor, ...],
    before: torch.Tensor,
    of_state: torch.Tensor,
    of_cell: torch.Tensor,
    out: tuple[torch.Tensor, ...],
) -> None:
    """The gradients of an LSTM's gates; that of the cell becomes that of the cell before."""
    i, f, g, o, cell = kept
    active = cell.tanh()
    of_cell.add_(_of_tanh(of_state * o, active))
    out[0].copy_(_of_sigmoid(of_cell * g, i))
    out[1].copy_(_of_sigmoid(of_cell * before, f))
    out[2].copy_(_of_tanh(of_cell * i, g))
    out[3].copy_(_of_sigmoid(of_state * active, o))
    of_cell.mul_(f)


def _gru(
    kept: tuple[torch.Tensor, ...], before: torch.Tensor, of_state: torch.Tensor, out: tuple[torch.Tensor, ...]
) -> None:
    """The gradients of a GRU's gates: of the state's part of the new gate, reset, update, new."""
    reset, update, part, new = kept
    of_new = out[3].copy_(_of_tanh(of_state * (1 - update), new))
    torch.mul(of_new, reset, out=out[0])
    out[1].copy_(_of_sigmoid(of_new * part, reset))
    out[2].copy_(_of_sigmoid(of_state * (before - new), update))


def _of_sigmoid(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.sigmoid_backward(grad, y)


def _of_tanh(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.tanh_backward(grad, y)


def _steps(layer: Layer, reverse: bool) -> list[int]:
    steps = range(layer.sizes[0])
    return list(reversed(steps) if reverse else steps)
