"""Recurrent layers in one direction: GRUs, plain RNNs, and oneDNN's LSTM layer.

The products with the input are one product for all time steps. Each time step only computes the product with the state
and the cell. The gradient computes all factors that don't depend on later steps in one operation.

Source: Cho et al. 2014 (GRU, in torch's form, where the reset gate is applied after the product); Elman 1990.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from lit_ort.ops.operator import NAMESPACE, Memory, Operator, define

aten = torch.ops.aten
Gradients = tuple[torch.Tensor, ...]
# The number of blocks of rows in a layer's weights, by mode.
_BLOCKS = {"gru": 3, "tanh": 1, "relu": 1}


def recurrent_layer(
    memory: Memory,
    x: torch.Tensor,
    state: torch.Tensor,
    input_weight: torch.Tensor,
    state_weight: torch.Tensor,
    input_bias: torch.Tensor | None,
    state_bias: torch.Tensor | None,
    mode: str,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes one layer of a GRU or plain RNN over all time steps.

    Args:
        memory: allocates the results and the workspace.
        x: float[length, batch, width]; the length is at least 1.
        state: float[1, batch, hidden], the state before the first step.
        input_weight, state_weight: float[blocks * hidden, width] and float[blocks * hidden, hidden], with 3 blocks
            (reset, update, new) for "gru" and one block otherwise.
        input_bias, state_bias: float[blocks * hidden], or None.
        mode: "gru", "tanh" or "relu".
        reverse: whether the steps run from the last to the first.

    Returns:
        The state of every step, float[length, batch, hidden]. For "gru", also the gates of every step, float[length,
        batch, 4 * hidden]: the reset gate, the update gate, the state's part of the new gate, and the new gate.
        Otherwise an empty tensor.
    """
    length, batch, hidden = len(x), x.shape[1], state.shape[2]
    output = memory.empty(length, batch, hidden, dtype=x.dtype)
    gates = memory.empty(length if mode == "gru" else 0, batch, 4 * hidden, dtype=x.dtype)
    inputs = memory.empty(length, batch, len(input_weight), dtype=x.dtype)
    _linear(x.reshape(length * batch, -1), input_weight, input_bias, inputs.view(length * batch, -1))
    if mode != "gru" and state_bias is not None:
        inputs.add_(state_bias)
    weight, before = state_weight.t(), state[0]
    for step in _order(length, reverse):
        after = output[step]
        if mode == "gru":
            _gru_cell(inputs[step], before, weight, state_bias, gates[step], after)
        else:
            torch.addmm(inputs[step], before, weight, out=after)
            after.tanh_() if mode == "tanh" else after.relu_()
        before = after
    return output, gates


def _gru_cell(
    inputs: torch.Tensor,
    before: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gates: torch.Tensor,
    after: torch.Tensor,
) -> None:
    """Computes one step, and stores (reset, update, state's part of new, new) in `gates` and the state in `after`."""
    hidden = before.shape[1]
    products = gates[:, : 3 * hidden]
    _linear(before, weight.t(), bias, products)
    gates[:, : 2 * hidden].add_(inputs[:, : 2 * hidden]).sigmoid_()
    reset, update, part, new = gates.chunk(4, 1)
    torch.addcmul(inputs[:, 2 * hidden :], reset, part, out=new).tanh_()
    torch.lerp(new, before, update, out=after)


def recurrent_layer_backward(
    memory: Memory,
    grad: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor,
    input_weight: torch.Tensor,
    state_weight: torch.Tensor,
    output: torch.Tensor,
    gates: torch.Tensor,
    mode: str,
    reverse: bool,
    wants_x: bool,
) -> Gradients:
    """The gradients of x (empty unless `wants_x`), the state, both weights and both biases, from that of the output."""
    length, batch, hidden = output.shape
    earlier = output[1:] if reverse else output[:-1]
    before = memory.empty(length, batch, hidden, dtype=x.dtype)
    torch.cat((earlier, state) if reverse else (state, earlier), out=before)
    carried = memory.empty(batch, hidden, dtype=x.dtype).zero_()
    # The gradients of the products with the input and, for a GRU, with the state.
    of_inputs = memory.empty(length, batch, _BLOCKS[mode] * hidden, dtype=x.dtype)
    of_products = memory.empty(*of_inputs.shape, dtype=x.dtype) if mode == "gru" else of_inputs
    if mode == "gru":
        _gru_factors(memory, before, gates, of_inputs, of_products)
    else:
        _plain_factors(output, mode, of_inputs)
    for step in _order(length, not reverse):
        carried.add_(grad[step])
        if mode == "gru":
            # Each factor becomes the gradient of its gate; the update gate also passes the gradient of the state on.
            of_inputs[step].view(batch, 3, hidden).mul_(carried.unsqueeze(1))
            of_products[step].view(batch, 3, hidden).mul_(carried.unsqueeze(1))
            carried.mul_(gates[step][:, hidden : 2 * hidden])
            carried.addmm_(of_products[step], state_weight)
        else:
            torch.mm(of_inputs[step].mul_(carried), state_weight, out=carried)
    flat_inputs, flat_products = of_inputs.flatten(0, 1), of_products.flatten(0, 1)
    of_x = memory.empty(*(x.shape if wants_x else (0,)), dtype=x.dtype)
    if wants_x:
        torch.mm(flat_inputs, input_weight, out=of_x.view(length * batch, -1))
    of_input_weight = memory.empty(*input_weight.shape, dtype=x.dtype)
    torch.mm(flat_inputs.t(), x.reshape(length * batch, -1), out=of_input_weight)
    of_state_weight = memory.empty(*state_weight.shape, dtype=x.dtype)
    torch.mm(flat_products.t(), before.flatten(0, 1), out=of_state_weight)
    biases = flat_inputs.sum(0), flat_products.sum(0)
    return of_x, carried.unsqueeze(0), of_input_weight, of_state_weight, *biases


def _gru_factors(
    memory: Memory, before: torch.Tensor, gates: torch.Tensor, of_inputs: torch.Tensor, of_products: torch.Tensor
) -> None:
    """Computes, for all steps, the factors from the gradient of a state to the gradients of a GRU's products."""
    reset, update, part, new = gates.chunk(4, 2)
    of_reset, of_update, of_new = of_inputs.chunk(3, 2)
    one_minus_update = memory.empty(*update.shape, dtype=update.dtype)
    torch.sub(1, update, out=one_minus_update)
    torch.mul(torch.mul(new, new, out=of_new).neg_().add_(1), one_minus_update, out=of_new)
    torch.sub(before, new, out=of_update).mul_(update).mul_(one_minus_update)
    torch.sub(1, reset, out=of_reset).mul_(reset).mul_(part).mul_(of_new)
    hidden = new.shape[2]
    of_products[..., : 2 * hidden].copy_(of_inputs[..., : 2 * hidden])
    torch.mul(of_new, reset, out=of_products[..., 2 * hidden :])


def _plain_factors(output: torch.Tensor, mode: str, out: torch.Tensor) -> None:
    """Computes the derivative of a plain cell's activation from the cell's output."""
    if mode == "tanh":
        torch.mul(output, output, out=out).neg_().add_(1)
    else:
        out.copy_(output > 0)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _order(length: int, reverse: bool) -> Sequence[int]:
    return range(length - 1, -1, -1) if reverse else range(length)


def _fake(x: torch.Tensor, state: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    length, batch, hidden = x.shape[0], x.shape[1], state.shape[2]
    is_gru = rest[-2] == "gru"
    return x.new_empty(length, batch, hidden), x.new_empty(length if is_gru else 0, batch, 4 * hidden)


def _fake_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor,
    input_weight: torch.Tensor,
    state_weight: torch.Tensor,
    *rest: Any,
) -> Gradients:
    of_x = x.new_empty(x.shape if rest[-1] else (0,))
    weights = input_weight.new_empty(input_weight.shape), state_weight.new_empty(state_weight.shape)
    return of_x, state.new_empty(state.shape), *weights, *(x.new_empty(len(input_weight)) for _ in range(2))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, state, input_weight, state_weight, input_bias, state_bias, *ctx.constants = inputs
    ctx.biases = input_bias is not None, state_bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, state, input_weight, state_weight, *output)


def _gradient(ctx: Any, grad: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
    wants_x = ctx.needs_input_grad[0]
    arguments = (*ctx.saved_tensors, *ctx.constants, wants_x)
    of_x, *others, of_input_bias, of_state_bias = torch.ops.lit_ort.recurrent_layer_backward(grad, *arguments)
    pairs = zip((of_input_bias, of_state_bias), ctx.biases, strict=True)
    biases = [gradient if has_bias else None for gradient, has_bias in pairs]
    return of_x if wants_x else None, *others, *biases, None, None


def _bytes(x: torch.Tensor, state: torch.Tensor, input_weight: torch.Tensor, *_: Any) -> int:
    return x.shape[0] * x.shape[1] * len(input_weight) * x.element_size()


def _backward_bytes(grad: torch.Tensor, *rest: Any) -> int:
    mode = rest[-3]
    return grad.numel() * grad.element_size() * (2 + (6 if mode == "gru" else 1))


def _onednn_kernel(target: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that calls an operator of oneDNN.

    oneDNN needs contiguous arguments, and saves tensors for its backward only if gradients are enabled.
    """

    def kernel(memory: Memory, *args: Any) -> Any:
        contiguous = [value.detach().contiguous() if isinstance(value, torch.Tensor) else value for value in args]
        # Sessions run without gradients.
        with torch.enable_grad():
            return target(*contiguous)

    return kernel


_WEIGHTS = "Tensor x, Tensor state, Tensor input_weight, Tensor state_weight"
_LAYER = define(
    f"recurrent_layer({_WEIGHTS}, Tensor? input_bias, Tensor? state_bias, str mode, bool reverse) -> (Tensor, Tensor)",
    recurrent_layer,
    _fake,
)
_BACKWARD = define(
    f"recurrent_layer_backward(Tensor grad, {_WEIGHTS}, Tensor output, Tensor gates, str mode, bool reverse, "
    "bool wants_x) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    recurrent_layer_backward,
    _fake_backward,
)
torch.library.register_autograd(f"{NAMESPACE}::recurrent_layer", _gradient, setup_context=_setup)


@register_flop_formula(torch.ops.lit_ort.recurrent_layer)
def _operations(
    x: Sequence[int], state: Sequence[int], input_weight: Sequence[int], state_weight: Sequence[int], *_: Any, **__: Any
) -> int:
    """The FLOPs of the products, from shapes."""
    return 2 * x[0] * x[1] * (math.prod(input_weight) + math.prod(state_weight))


@register_flop_formula(torch.ops.lit_ort.recurrent_layer_backward)
def _backward_operations(grad: Sequence[int], *rest: Any, **_: Any) -> int:
    return 2 * _operations(*rest)


OPERATORS = (
    Operator(_LAYER, recurrent_layer, workspace_bytes=_bytes, recomputable=False),
    Operator(_BACKWARD, recurrent_layer_backward, workspace_bytes=_backward_bytes, recomputable=False),
    *(
        Operator(target, _onednn_kernel(target), recomputable=False)
        for target in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
    ),
)
