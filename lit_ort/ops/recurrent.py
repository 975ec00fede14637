"""Recurrent layers in one direction: LSTMs, GRUs and plain RNNs.

The matmuls with the input are one matmul for all time steps. A loop over time in machine code computes the matmuls
with the state and the cells; that of the gradient computes the gradients of the gates, from which a matmul for all
time steps makes those of the weights.

Source: Hochreiter and Schmidhuber 1997 (LSTM, with the forget gate of Gers et al. 2000); Cho et al. 2014 (GRU, in
torch's form, where the reset gate is applied after the matmul); Elman 1990.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import register_flop_formula

from lit_ort.errors import KernelError
from lit_ort.kernels.recurrent_arguments import CELLS, DTYPES, Cell, Layer, LayerGradients, PackedSteps
from lit_ort.ops import recurrent_steps
from lit_ort.ops.matmul import matmul
from lit_ort.ops.operator import NAMESPACE, Allocator, Operator, define

if TYPE_CHECKING:
    from lit_ort.kernels.recurrent_loop import RecurrentLoops

aten = torch.ops.aten
Gradients = tuple[torch.Tensor, ...]


@functools.cache
def _loops() -> RecurrentLoops | None:
    """The machine code of this process; None if there is none for this CPU, or llvmlite is not installed."""
    try:
        from lit_ort.kernels.recurrent_loop import RecurrentLoops  # loads LLVM

        return RecurrentLoops()
    except (ImportError, KernelError):
        return None


def recurrent_layer(
    allocator: Allocator,
    x: torch.Tensor,
    state: torch.Tensor,
    cell: torch.Tensor | None,
    input_weight: torch.Tensor,
    state_weight: torch.Tensor,
    input_bias: torch.Tensor | None,
    state_bias: torch.Tensor | None,
    mode: str,
    reverse: bool,
    batch_sizes: torch.Tensor | None = None,
) -> Gradients:
    """Computes one layer over all time steps.

    Args:
        allocator: allocates the results and the workspace.
        x: float[length, batch, width]; the length is at least 1. With `batch_sizes`, float[rows, width], the data of a
            packed sequence.
        state: float[1, batch, hidden], the state before the first step.
        cell: the same for an LSTM's cell; None for others.
        input_weight, state_weight: float[gates * hidden, width] and float[gates * hidden, hidden], with the gates
            (input, forget, cell, output) for "lstm", (reset, update, new) for "gru", and one otherwise.
        input_bias, state_bias: float[gates * hidden], or None.
        mode: "lstm", "gru", "tanh" or "relu".
        reverse: whether the steps run from the last to the first.
        batch_sizes: int64[length], the rows of each step of a packed sequence.

    Returns:
        The state of every step, float[length, batch, hidden] or float[rows, hidden]; the last state, float[1,
        batch, hidden]; the same of an LSTM's cell, otherwise empty; what the gradient needs of every step (see `Cell`).
    """
    kind = CELLS[mode]
    batch, hidden = state.shape[1:]
    output = allocator.empty(*x.shape[:-1], hidden, dtype=x.dtype)
    saved = allocator.empty(*_saved_shape(x, kind, hidden), dtype=x.dtype)
    matmuls = (saved if kind.saved else output).flatten(0, -2)[:, : kind.gates * hidden]
    loops = _loops() if x.dtype in DTYPES else None
    # Torch's operators would round a matmul and its sum with a bias separately, the loops add both biases at once.
    added = input_bias if loops is None else None
    matmul(x.reshape(-1, x.shape[-1]), input_weight.t(), matmuls, added)
    loop_bias = None if loops is None or input_bias is None else input_bias.contiguous()
    state_bias = None if state_bias is None else state_bias.contiguous()
    states = _by_rows(state[0]), None if cell is None else _by_rows(cell[0])
    packed = _packed_steps(x, state, batch_sizes)
    layer = Layer(mode, reverse, state_weight.contiguous(), loop_bias, state_bias, *states, output, saved, packed)
    if loops is None:
        recurrent_steps.forward(layer)
    else:
        loops.forward(layer, allocator.empty(loops.packed_elements(mode, hidden, x.dtype), dtype=x.dtype))
    last = allocator.empty(1, batch, hidden, dtype=x.dtype).copy_(_last(layer, output))
    last_cell = allocator.empty(0 if cell is None else 1, batch, hidden, dtype=x.dtype)
    if cell is not None:
        last_cell.copy_(_last(layer, saved[..., 4 * hidden :]))
    return output, last, last_cell, saved


def _packed_steps(x: torch.Tensor, state: torch.Tensor, batch_sizes: torch.Tensor | None) -> PackedSteps | None:
    """The steps of a packed sequence; None if the steps are not packed.

    Raises:
        RuntimeError: batch sizes are not those of the rows, as with a length beyond the padded sequence.
    """
    if batch_sizes is None:
        return None
    steps = PackedSteps(batch_sizes)
    rows = steps.rows
    falls = all(later <= earlier for earlier, later in itertools.pairwise(rows))
    if sum(rows) != len(x) or rows[0] != state.shape[1] or rows[-1] < 1 or not falls:
        raise RuntimeError(
            f"the batch sizes {rows} of a packed sequence with {len(x)} rows and a state of {state.shape[1]} must fall "
            "from the latter to at least 1, and their sum must be the number of rows. Pass lengths up to that of the "
            "padded sequences."
        )
    return steps


def _saved_shape(x: torch.Tensor, kind: Cell, hidden: int) -> tuple[int, ...]:
    """The shape of what a layer saves besides its output."""
    return (x.shape[0] if kind.saved else 0, *x.shape[1:-1], kind.saved * hidden)


def _last(layer: Layer, steps: torch.Tensor) -> torch.Tensor:
    """Each row in the last step that it has in the layer's direction."""
    if layer.packed is None:
        return steps[0 if layer.reverse else -1]
    return steps[: layer.sizes[1]] if layer.reverse else steps[layer.packed.last]


def recurrent_layer_backward(
    allocator: Allocator,
    grad: torch.Tensor | None,
    grad_last: torch.Tensor | None,
    grad_last_cell: torch.Tensor | None,
    x: torch.Tensor,
    state: torch.Tensor,
    cell: torch.Tensor | None,
    input_weight: torch.Tensor,
    state_weight: torch.Tensor,
    output: torch.Tensor,
    saved: torch.Tensor,
    mode: str,
    reverse: bool,
    wants_x: bool,
    batch_sizes: torch.Tensor | None = None,
) -> Gradients:
    """The gradients of x (empty unless `wants_x`), the state, the cell (empty if there is none), both weights and both
    biases, from those of the output, the last state and the last state of an LSTM's cell; None is zeros."""
    kind = CELLS[mode]
    batch, hidden = state.shape[1:]
    gates = allocator.empty(*x.shape[:-1], kind.gradients * hidden, dtype=x.dtype)
    of_state = _copied(grad_last, allocator.empty(1, batch, hidden, dtype=x.dtype))
    of_cell = _copied(grad_last_cell, allocator.empty(0 if cell is None else 1, batch, hidden, dtype=x.dtype))
    of_output = output.new_zeros(hidden).expand(output.shape) if grad is None else _by_rows(grad)
    weight, states = state_weight.contiguous(), (_by_rows(state[0]), None if cell is None else _by_rows(cell[0]))
    packed = _packed_steps(x, state, batch_sizes)
    layer = Layer(mode, reverse, weight, None, None, *states, _by_rows(output), _by_rows(saved), packed)
    gradients = LayerGradients(of_output, gates, of_state[0], None if cell is None else of_cell[0])
    loops = _loops() if x.dtype in DTYPES else None
    if loops is None:
        recurrent_steps.backward(layer, gradients)
    else:
        loops.backward(layer, gradients, allocator.empty(loops.packed_elements(mode, hidden, x.dtype), dtype=x.dtype))
    of_inputs = gates.flatten(0, -2)[:, -kind.gates * hidden :]
    of_x = allocator.empty(*(x.shape if wants_x else (0,)), dtype=x.dtype)
    if wants_x:
        matmul(of_inputs, input_weight, out=of_x.view(-1, x.shape[-1]))
    of_input_weight = allocator.empty(*input_weight.shape, dtype=x.dtype)
    matmul(of_inputs.t(), x.reshape(-1, x.shape[-1]), out=of_input_weight)
    of_state_weight = allocator.empty(*state_weight.shape, dtype=x.dtype)
    of_input_bias, of_state_bias = (allocator.empty(len(state_weight), dtype=x.dtype) for _ in range(2))
    sums = gates.flatten(0, -2).sum(0)
    of_input_bias.copy_(sums[-kind.gates * hidden :])
    for rows, columns in _in_order(kind.turned, kind.gates, hidden):
        _state_weight_gradient(layer, gates[..., columns], of_state_weight[rows])
        of_state_bias[rows] = sums[columns]
    return of_x, of_state, of_cell, of_input_weight, of_state_weight, of_input_bias, of_state_bias


def _copied(tensor: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    return out.zero_() if tensor is None else out.copy_(tensor)


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _in_order(turned: int, gates: int, hidden: int) -> list[tuple[slice, slice]]:
    """The rows of the state's weights that belong to columns of the gradients of its matmuls."""
    split = turned * hidden
    if not split:
        return [(slice(0, gates * hidden), slice(0, gates * hidden))]
    rest = gates * hidden - split
    return [(slice(split, gates * hidden), slice(0, rest)), (slice(0, split), slice(rest, gates * hidden))]


def _state_weight_gradient(layer: Layer, of_matmuls: torch.Tensor, out: torch.Tensor) -> None:
    """The matmuls of gradients with the states before their steps, over all steps."""
    output, batch = layer.output, layer.sizes[1]
    if layer.packed is not None:
        # Row by row, the steps behind others and the steps before them.
        later, earlier = of_matmuls[batch:], output[layer.packed.continued]
        if layer.reverse:
            later, earlier = of_matmuls[layer.packed.continued], output[batch:]
    elif layer.reverse:
        later, earlier = of_matmuls[:-1].flatten(0, 1), output[1:].flatten(0, 1)
    else:
        later, earlier = of_matmuls[1:].flatten(0, 1), output[:-1].flatten(0, 1)
    matmul(later.t(), earlier, out=out)
    out.addmm_(_first(layer, of_matmuls).t(), layer.state)


def _first(layer: Layer, steps: torch.Tensor) -> torch.Tensor:
    """Each row in the first step that it has in the layer's direction."""
    if layer.packed is None:
        return steps[-1 if layer.reverse else 0]
    return steps[layer.packed.last] if layer.reverse else steps[: layer.sizes[1]]


def _fake(x: torch.Tensor, state: torch.Tensor, cell: torch.Tensor | None, *rest: Any) -> Gradients:
    batch, hidden = state.shape[1:]
    last = x.new_empty(1, batch, hidden), x.new_empty(0 if cell is None else 1, batch, hidden)
    return x.new_empty(*x.shape[:-1], hidden), *last, x.new_empty(_saved_shape(x, CELLS[rest[4]], hidden))


def _fake_backward(
    grad: torch.Tensor | None,
    grad_last: torch.Tensor | None,
    grad_last_cell: torch.Tensor | None,
    x: torch.Tensor,
    state: torch.Tensor,
    cell: torch.Tensor | None,
    input_weight: torch.Tensor,
    state_weight: torch.Tensor,
    *rest: Any,
) -> Gradients:
    of_x = x.new_empty(x.shape if rest[4] else (0,))
    of_cell = state.new_empty(0 if cell is None else 1, *state.shape[1:])
    weights = input_weight.new_empty(input_weight.shape), state_weight.new_empty(state_weight.shape)
    return of_x, state.new_empty(state.shape), of_cell, *weights, *(x.new_empty(len(input_weight)) for _ in range(2))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
    x, state, cell, input_weight, state_weight, input_bias, state_bias, *ctx.constants = inputs[:9]
    batch_sizes = inputs[9] if len(inputs) > 9 else None
    ctx.biases = input_bias is not None, state_bias is not None
    # Gradients of results that aren't used stay None.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2 if cell is None else 3 :])
    ctx.save_for_backward(x, state, cell, input_weight, state_weight, output[0], output[3], batch_sizes)
    ctx.count = len(inputs)


def _gradient(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    wants_x = ctx.needs_input_grad[0]
    *saved, batch_sizes = ctx.saved_tensors
    arguments = (*grads[:3], *saved, *ctx.constants, wants_x, batch_sizes)
    results = torch.ops.lit_ort.recurrent_layer_backward(*arguments)
    of_x, of_state, of_cell, *weights, of_input_bias, of_state_bias = results
    pairs = zip((of_input_bias, of_state_bias), ctx.biases, strict=True)
    biases = [gradient if has_bias else None for gradient, has_bias in pairs]
    has_cell = saved[2] is not None
    of_tensors = of_x if wants_x else None, of_state, of_cell if has_cell else None, *weights, *biases
    return *of_tensors, *[None] * (ctx.count - len(of_tensors))


def _packed_bytes(state_weight: torch.Tensor) -> int:
    return len(state_weight) * (state_weight.shape[1] + 16) * state_weight.element_size()


def _bytes(
    x: torch.Tensor, state: torch.Tensor, cell: Any, _: torch.Tensor, state_weight: torch.Tensor, *__: Any
) -> int:
    return _packed_bytes(state_weight)


def _backward_bytes(*args: Any) -> int:
    output = args[8]
    return output.numel() * output.element_size() * CELLS[args[10]].gradients + _packed_bytes(args[7])


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


_WEIGHTS = "Tensor x, Tensor state, Tensor? cell, Tensor input_weight, Tensor state_weight"
_LAYER = define(
    f"recurrent_layer({_WEIGHTS}, Tensor? input_bias, Tensor? state_bias, str mode, bool reverse, "
    "Tensor? batch_sizes=None) -> (Tensor, Tensor, Tensor, Tensor)",
    recurrent_layer,
    _fake,
)
_BACKWARD = define(
    f"recurrent_layer_backward(Tensor? grad, Tensor? grad_last, Tensor? grad_last_cell, {_WEIGHTS}, Tensor output, "
    "Tensor saved, str mode, bool reverse, bool wants_x, Tensor? batch_sizes=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    recurrent_layer_backward,
    _fake_backward,
)
torch.library.register_autograd(f"{NAMESPACE}::recurrent_layer", _gradient, setup_context=_setup)


@register_flop_formula(torch.ops.lit_ort.recurrent_layer)
def _operations(
    x: Sequence[int],
    state: Sequence[int],
    cell: Sequence[int] | None,
    input_weight: Sequence[int],
    state_weight: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """The FLOPs of the matmuls, from shapes."""
    return 2 * math.prod(x[:-1]) * (math.prod(input_weight) + math.prod(state_weight))


@register_flop_formula(torch.ops.lit_ort.recurrent_layer_backward)
def _backward_operations(*args: Any, **_: Any) -> int:
    return 2 * _operations(*args[3:])


OPERATORS = (
    Operator(_LAYER, recurrent_layer, workspace_bytes=_bytes, recomputable=False),
    Operator(_BACKWARD, recurrent_layer_backward, workspace_bytes=_backward_bytes, recomputable=False),
    *(
        Operator(target, _onednn_kernel(target), recomputable=False)
        for target in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
    ),
)
