"""Recurrent layers in traces: the shapes of their results, and the operators that they become.

By default, torch computes shapes by tracing every time step, which fixes the length of the input in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from lit_ort._compat.patching import replaced, replaced_entry

aten = torch.ops.aten
# From the functions in Dynamo's graphs to ATen operators.
LAYERS: dict[Any, torch._ops.OpOverload] = {
    torch.lstm: aten.lstm.input,
    torch.gru: aten.gru.input,
    torch.rnn_tanh: aten.rnn_tanh.input,
    torch.rnn_relu: aten.rnn_relu.input,
}
PACKED_LAYERS = (aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def shapes_without_steps() -> Iterator[None]:
    """Makes Dynamo compute the shapes of a recurrent layer's results without tracing its time steps.

    Otherwise Dynamo traces them with fake tensors, and recompiles the step for every length.
    """
    with ExitStack() as stack:
        for target in (*LAYERS.values(), *PACKED_LAYERS):
            target._dispatch_cache.clear()
            shaped = _shaped(target, target.py_kernels.get(_COMPOSITE))
            stack.enter_context(replaced_entry(target.py_kernels, _COMPOSITE, shaped))
            stack.callback(target._dispatch_cache.clear)
        yield


@contextmanager
def layers_of_this_cpu() -> Iterator[None]:
    """Makes traces decompose LSTMs in bfloat16 into time steps where oneDNN, which they call otherwise, has none."""
    original = decompositions.select_one_layer_lstm_function

    def select(input: torch.Tensor, hx: Any, params: Any) -> Callable[..., Any]:
        has_layer = input.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return original(input, hx, params) if has_layer else decompositions.one_layer_lstm

    with replaced(decompositions, "select_one_layer_lstm_function", select):
        yield


def _shaped(target: torch._ops.OpOverload, original: Callable[..., Any] | None) -> Callable[..., Any]:
    """A kernel that computes shapes for fake tensors, and calls the original kernel for other tensors."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], FakeTensor) and not kwargs and len(args) == len(target._schema.arguments):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            # The results require grad if one of the arguments does.
            zero = sum(tensor.sum() for tensor in tensors if tensor.is_floating_point()) * 0
            shapes = results_of_packed if target in PACKED_LAYERS else results_of
            return tuple(result + zero for result in shapes(*args))
        return original(*args, **kwargs) if original is not None else target._op_dk(_COMPOSITE, *args, **kwargs)

    return kernel


def results_of(
    input: torch.Tensor,
    hx: torch.Tensor | list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Empty tensors with the shapes of the results: the output of every time step, and the last state or states.

    Args:
        input: float[batch, length, width], or float[length, batch, width] if not `batch_first`.
        hx: float[layers * directions, batch, hidden]; for an LSTM, this and float[layers * directions, batch, cells].
    """
    states = [hx] if isinstance(hx, torch.Tensor) else hx
    width = states[0].size(-1) * (2 if bidirectional else 1)
    output = input.new_empty(*input.shape[:2], width)
    if batch_first:
        # In eager, the kernel computes it by steps.
        output = input.new_empty(input.shape[1], input.shape[0], width).transpose(0, 1)
    return (output, *(state.new_empty(state.shape) for state in states))


def results_of_packed(
    data: torch.Tensor, batch_sizes: torch.Tensor, hx: torch.Tensor | list[torch.Tensor], *rest: Any
) -> tuple[torch.Tensor, ...]:
    """Empty tensors with the shapes of the results for a packed sequence: the packed output, and the last states.

    Args:
        data: float[rows, width].
        batch_sizes: int64[length].
        hx: as above.
        rest: the other arguments; the last is whether the layer is bidirectional.
    """
    states = [hx] if isinstance(hx, torch.Tensor) else hx
    output = data.new_empty(data.shape[0], states[0].size(-1) * (2 if rest[-1] else 1))
    return (output, *(state.new_empty(state.shape) for state in states))
