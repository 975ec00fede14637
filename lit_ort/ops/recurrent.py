"""Recurrent layers in one direction: LSTMs, GRUs and plain RNNs.

The matmuls with the input are one matmul for all time steps, before a loop over time in machine code, which computes
the matmuls with the state and the cells. That of the gradient computes the gradients of the gates, from which matmuls
for all time steps make those of the input and the weights.

Source: Hochreiter and Schmidhuber 1997 (LSTM, with the forget gate of Gers et al. 2000); Cho et al. 2014 (GRU, in
torch's form, where the reset gate is applied after the matmul); Elman 1990.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.flop_counter import register_flop_formula

from lit_ort.errors import KernelError
from lit_ort.kernels.kernel_arguments import DTYPES
from lit_ort.kernels.recurrent_arguments import CELLS, Cell, Layer, LayerGradients, PackedSteps
from lit_ort.ops import recurrent_steps
from lit_ort.ops.operator import NAMESPACE, Allocator, Operator, define

if TYPE_CHECKING:
    from lit_ort.kernels.recurrent_loop import RecurrentLoops

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


@functools.cache
def recurrent_loops() -> RecurrentLoops | None:
    """The machine code of this process; None if there is none for this CPU, or llvmlite is not installed."""
    try:
        from lit_ort.kernels.recurrent_loop import RecurrentLoops  # loads LLVM

        return RecurrentLoops()
    except (ImportError, KernelError):
        return None


def recurrent_layer(
    x: torch.Tensor,
    state: torch.Tensor,
    cell: torch.Tensor | None,
    input_weight: torch.Tensor,
    state_weight: torch.Tensor,
    input_bias: torch.Tensor | None,
    state_bias: torch.Tensor | None,
    mode: str,
    reverse: bool,
    tables: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> Tensors:
    """Computes one layer over all time steps, as a matmul and `recurrent_loop`, in the dtype of `x`.

    Args:
        x: float[length, batch, width]; the length is at least 1. Or float[rows, width], the data of a packed sequence.
        state: float[1, batch, hidden], the state before the first step.
        cell: the same for an LSTM's cell; None for others.
        input_weight, state_weight: float[gates * hidden, width] and float[gates * hidden, hidden], with the gates
            (input, forget, cell, output) for "lstm", (reset, update, new) for "gru", and one otherwise.
        input_bias, state_bias: float[gates * hidden], or None.
        mode: "lstm", "gru", "tanh" or "relu".
        reverse: whether the steps run from the last to the first.
        tables, places: of a packed sequence, the results of `packed_steps`.

    Returns:
        The state of every step, float[length, batch, hidden] or float[rows, hidden]; the last state, float[1,
        batch, hidden]; the same of an LSTM's cell, otherwise empty.
    """
    rows, weight = x.reshape(-1, x.shape[-1]), input_weight.t()
    with torch.autocast(x.device.type, enabled=False):
        if input_bias is None or x.dtype in DTYPES:
            matmuls, loop_bias = torch.mm(rows, weight), input_bias
        else:
            # Torch's operators would round a matmul and its sum with a bias separately.
            matmuls, loop_bias = torch.addmm(input_bias, rows, weight), None
    matmuls = matmuls.view(*x.shape[:-1], len(input_weight))
    arguments = (matmuls, state, cell, state_weight, loop_bias, state_bias, mode, reverse, tables, places)
    return torch.ops.lit_ort.recurrent_loop(*arguments)[:3]


def recurrent_loop(
    allocator: Allocator,
    matmuls: torch.Tensor,
    state: torch.Tensor,
    cell: torch.Tensor | None,
    state_weight: torch.Tensor,
    input_bias: torch.Tensor | None,
    state_bias: torch.Tensor | None,
    mode: str,
    reverse: bool,
    tables: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> Tensors:
    """Computes a layer from the matmuls of its weights with the input.

    Args:
        allocator: allocates the results and the workspace.
        matmuls: float[length, batch, gates * hidden], or float[rows, gates * hidden] of a packed sequence.
        state, cell, state_weight, input_bias, state_bias, mode, reverse, tables, places: as in `recurrent_layer`.

    Returns:
        As `recurrent_layer`, and what the gradient needs of every step (see `Cell`); empty for plain layers.
    """
    kind, dtype = CELLS[mode], matmuls.dtype
    batch, hidden = state.shape[1:]
    output = allocator.empty(*matmuls.shape[:-1], hidden, dtype=dtype)
    saved = allocator.empty(*_saved_shape(matmuls, kind, hidden), dtype=dtype)
    loops = recurrent_loops() if dtype in DTYPES else None
    layer = Layer(
        mode,
        reverse,
        state_weight.contiguous(),
        None if input_bias is None else input_bias.contiguous(),
        None if state_bias is None else state_bias.contiguous(),
        _by_rows(state[0]),
        None if cell is None else _by_rows(cell[0]),
        output,
        saved if kind.saved else None,
        _by_rows(matmuls),
        None if tables is None else PackedSteps(tables, reverse),
    )
    if loops is None:
        recurrent_steps.forward(layer)
    else:
        loops.forward(layer, allocator.empty(loops.packed_elements(mode, hidden, dtype), dtype=dtype))
    last = allocator.empty(1, batch, hidden, dtype=dtype).copy_(_last(layer, output, places))
    last_cell = allocator.empty(0 if cell is None else 1, batch, hidden, dtype=dtype)
    if cell is not None:
        last_cell.copy_(_last(layer, saved[..., 4 * hidden :], places))
    return output, last, last_cell, saved


def packed_steps(
    allocator: Allocator, batch_sizes: torch.Tensor, rows: int, batch: int, reverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a packed sequence's steps, and the places of those that other rows need.

    Args:
        allocator: allocates the results.
        batch_sizes: int64[length], the rows of each step in the order of time.
        rows: the rows of all steps.
        batch: the rows of the first step.
        reverse: whether the layer's steps run from the last to the first.

    Returns:
        `PackedSteps.tables`, int64[4, length + 2]; and int64[batch + rows], the place of each sequence's row in the
        step that runs last, followed by the place of the state before each row in the initial states and those of all
        rows.

    Raises:
        RuntimeError: batch sizes are not those of the rows, as with a length beyond the padded sequence.
    """
    sizes = batch_sizes.tolist()
    falls = all(later <= earlier for earlier, later in itertools.pairwise(sizes))
    if sum(sizes) != rows or sizes[0] != batch or sizes[-1] < 1 or not falls:
        raise RuntimeError(
            f"the batch sizes {sizes} of a packed sequence with {rows} rows and a state of {batch} must fall from the "
            "latter to at least 1, and their sum must be the number of rows. Pass lengths up to that of the padded "
            "sequences."
        )
    starts = [0, *itertools.accumulate(sizes[:-1])]
    tables = allocator.empty(4, len(sizes) + 2, dtype=torch.int64)
    in_time = [[0, *sizes, 0], [0, *starts, 0]]
    backwards = [[0, *reversed(sizes), 0], [0, *reversed(starts), 0]]
    tables.numpy()[:] = [*backwards, *in_time] if reverse else [*in_time, *backwards]
    places = allocator.empty(batch + rows, dtype=torch.int64)
    of_last, before = np.split(places.numpy(), [batch])
    numbers, later = np.arange(batch), np.arange(batch, rows)
    of_steps = batch_sizes.numpy()
    lengths = (of_steps[:, None] > numbers).sum(0)
    ends, earlier = np.array(starts)[lengths - 1] + numbers, later - np.repeat(of_steps[:-1], of_steps[1:])
    if reverse:
        of_last[:], before[ends], before[earlier] = numbers, numbers, batch + later
    else:
        of_last[:], before[:batch], before[batch:] = ends, numbers, batch + earlier
    return tables, places


def _saved_shape(x: torch.Tensor, kind: Cell, hidden: int) -> tuple[int, ...]:
    """The shape of what a layer saves besides its output."""
    return (x.shape[0] if kind.saved else 0, *x.shape[1:-1], kind.saved * hidden)


def _last(layer: Layer, steps: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """Each row in the last step that it has in the layer's direction."""
    if places is None:
        return steps[0 if layer.reverse else -1]
    return steps.index_select(0, places[: layer.sizes[1]])


def recurrent_loop_backward(
    allocator: Allocator,
    grad: torch.Tensor | None,
    grad_last: torch.Tensor | None,
    grad_last_cell: torch.Tensor | None,
    state: torch.Tensor,
    cell: torch.Tensor | None,
    state_weight: torch.Tensor,
    output: torch.Tensor,
    saved: torch.Tensor | None,
    mode: str,
    reverse: bool,
    tables: torch.Tensor | None = None,
) -> Tensors:
    """The gradients of the gates of every step (see `Cell`), float[length, batch, blocks * hidden] or float[rows,
    blocks * hidden], of the state and of the cell (empty if there is none), from those of the output, the last state
    and the last state of an LSTM's cell; None is zeros."""
    kind, dtype = CELLS[mode], output.dtype
    batch, hidden = state.shape[1:]
    gates = allocator.empty(*output.shape[:-1], kind.gradients * hidden, dtype=dtype)
    of_state = _copied(grad_last, allocator.empty(1, batch, hidden, dtype=dtype))
    of_cell = _copied(grad_last_cell, allocator.empty(0 if cell is None else 1, batch, hidden, dtype=dtype))
    of_output = output.new_zeros(hidden).expand(output.shape) if grad is None else _by_rows(grad)
    layer = Layer(
        mode,
        reverse,
        state_weight.contiguous(),
        None,
        None,
        _by_rows(state[0]),
        None if cell is None else _by_rows(cell[0]),
        _by_rows(output),
        None if saved is None else _by_rows(saved),
        packed=None if tables is None else PackedSteps(tables, reverse),
    )
    gradients = LayerGradients(of_output, gates, of_state[0], None if cell is None else of_cell[0])
    loops = recurrent_loops() if dtype in DTYPES else None
    if loops is None:
        recurrent_steps.backward(layer, gradients)
    else:
        loops.backward(layer, gradients, allocator.empty(loops.packed_elements(mode, hidden, dtype), dtype=dtype))
    return gates, of_state, of_cell


def _copied(tensor: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    return out.zero_() if tensor is None else out.copy_(tensor)


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _states_before(
    output: torch.Tensor, state: torch.Tensor, reverse: bool, places: torch.Tensor | None
) -> torch.Tensor:
    """The state before every step, [rows of all steps, hidden]."""
    if places is not None:
        return torch.cat((state[0], output)).index_select(0, places[state.shape[1] :])
    if isinstance(output.shape[0], int) and len(output) == 1:
        return state[0]
    parts = (output[1:], state) if reverse else (state, output[:-1])
    return torch.cat(parts).flatten(0, 1)


def _in_order_of_weights(value: torch.Tensor, kind: Cell, hidden: int) -> torch.Tensor:
    """The gradients of the rows of the state's weights, from those in the order of the gradients of the gates."""
    split = (kind.gates - kind.turned) * hidden
    return torch.cat((value[split:], value[:split])) if kind.turned else value


def _fake(matmuls: torch.Tensor, state: torch.Tensor, cell: torch.Tensor | None, *rest: Any) -> Tensors:
    batch, hidden = state.shape[1:]
    last = matmuls.new_empty(1, batch, hidden), matmuls.new_empty(0 if cell is None else 1, batch, hidden)
    saved = matmuls.new_empty(_saved_shape(matmuls, CELLS[rest[3]], hidden))
    return matmuls.new_empty(*matmuls.shape[:-1], hidden), *last, saved


def _fake_steps(batch_sizes: torch.Tensor, rows: int, batch: int, reverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_sizes.new_empty(4, batch_sizes.shape[0] + 2), batch_sizes.new_empty(batch + rows)


def _fake_backward(
    grad: torch.Tensor | None,
    grad_last: torch.Tensor | None,
    grad_last_cell: torch.Tensor | None,
    state: torch.Tensor,
    cell: torch.Tensor | None,
    state_weight: torch.Tensor,
    output: torch.Tensor,
    saved: torch.Tensor | None,
    mode: str,
    *rest: Any,
) -> Tensors:
    gates = output.new_empty(*output.shape[:-1], CELLS[mode].gradients * state.shape[-1])
    return gates, state.new_empty(state.shape), state.new_empty(0 if cell is None else 1, *state.shape[1:])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    _, state, cell, state_weight, input_bias, state_bias, *ctx.constants = inputs[:8]
    tables, places = inputs[8:] if len(inputs) > 8 else (None, None)
    ctx.biases = input_bias is not None, state_bias is not None
    # Gradients of results that aren't used stay None.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2 if cell is None else 3 :])
    saved = output[3] if CELLS[ctx.constants[0]].saved else None
    ctx.save_for_backward(state, cell, state_weight, output[0], saved, tables, places)
    ctx.count = len(inputs)


def _gradient(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    state, cell, state_weight, output, saved, tables, places = ctx.saved_tensors
    mode, reverse = ctx.constants
    kind, hidden = CELLS[mode], state.shape[-1]
    arguments = (*grads[:3], state, cell, state_weight, output, saved, mode, reverse, tables)
    gates, of_state, of_cell = torch.ops.lit_ort.recurrent_loop_backward(*arguments)
    rows, width = gates.flatten(0, -2), kind.gates * hidden
    of_matmuls, of_inputs = (rows[:, :width], gates[..., -width:]) if kind.turned else (rows, gates)
    of_weight = torch.mm(of_matmuls.t(), _states_before(output, state, reverse, places))
    sums = rows.sum(0)
    of_biases = sums[-width:], _in_order_of_weights(sums[:width], kind, hidden)
    biases = [gradient if has_bias else None for gradient, has_bias in zip(of_biases, ctx.biases, strict=True)]
    of_tensors = of_inputs, of_state, None if cell is None else of_cell
    found = (*of_tensors, _in_order_of_weights(of_weight, kind, hidden), *biases)
    return *found, *[None] * (ctx.count - len(found))


def _packed_bytes(state_weight: torch.Tensor) -> int:
    return len(state_weight) * (state_weight.shape[1] + 16) * state_weight.element_size()


def _bytes(matmuls: torch.Tensor, state: Any, cell: Any, state_weight: torch.Tensor, *_: Any) -> int:
    return _packed_bytes(state_weight)


def _backward_bytes(*args: Any) -> int:
    return _packed_bytes(args[5])


def _onednn_kernel(target: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that calls an operator of oneDNN, which torch's LSTMs are made of.

    oneDNN needs contiguous arguments, and saves tensors for its backward only if gradients are enabled.
    """

    def kernel(allocator: Allocator, *args: Any) -> Any:
        contiguous = [value.detach().contiguous() if isinstance(value, torch.Tensor) else value for value in args]
        # Sessions run without gradients.
        with torch.enable_grad():
            return target(*contiguous)

    return kernel


_STATES = "Tensor state, Tensor? cell"
_LAYER = (
    "Tensor state_weight, Tensor? input_bias, Tensor? state_bias, str mode, bool reverse, Tensor? tables=None, "
    "Tensor? places=None"
)
torch.library.define(
    f"{NAMESPACE}::recurrent_layer", f"(Tensor x, {_STATES}, Tensor input_weight, {_LAYER}) -> (Tensor, Tensor, Tensor)"
)
torch.library.impl(f"{NAMESPACE}::recurrent_layer", "CompositeImplicitAutograd", recurrent_layer)
_LOOP = define(
    f"recurrent_loop(Tensor matmuls, {_STATES}, {_LAYER}) -> (Tensor, Tensor, Tensor, Tensor)", recurrent_loop, _fake
)
_BACKWARD = define(
    f"recurrent_loop_backward(Tensor? grad, Tensor? grad_last, Tensor? grad_last_cell, {_STATES}, Tensor state_weight, "
    "Tensor output, Tensor? saved, str mode, bool reverse, Tensor? tables=None) -> (Tensor, Tensor, Tensor)",
    recurrent_loop_backward,
    _fake_backward,
)
_STEPS = define(
    "packed_steps(Tensor batch_sizes, SymInt rows, SymInt batch, bool reverse) -> (Tensor, Tensor)",
    packed_steps,
    _fake_steps,
)
torch.library.register_autograd(f"{NAMESPACE}::recurrent_loop", _gradient, setup_context=_setup)


@register_flop_formula(torch.ops.lit_ort.recurrent_loop)
def _operations(matmuls: Sequence[int], state: Any, cell: Any, state_weight: Sequence[int], *_: Any, **__: Any) -> int:
    """The FLOPs of the matmuls with the state, from shapes."""
    return 2 * math.prod(matmuls[:-1]) * math.prod(state_weight)


@register_flop_formula(torch.ops.lit_ort.recurrent_loop_backward)
def _backward_operations(*args: Any, **_: Any) -> int:
    return 2 * math.prod(args[6][:-1]) * math.prod(args[5])


OPERATORS = (
    Operator(_LOOP, recurrent_loop, workspace_bytes=_bytes, recomputable=False),
    Operator(_BACKWARD, recurrent_loop_backward, workspace_bytes=_backward_bytes, recomputable=False),
    Operator(_STEPS, packed_steps, recomputable=False),
    *(
        Operator(target, _onednn_kernel(target), recomputable=False)
        for target in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
    ),
)
