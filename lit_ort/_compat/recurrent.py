"""The shapes of recurrent layers' results.

torch follows such a layer step by step in time to tell them, which ties a graph to the length of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from lit_ort._compat.patching import replaced_entry

aten = torch.ops.aten
# As Dynamo writes them.
LAYERS: dict[Any, torch._ops.OpOverload] = {
    torch.lstm: aten.lstm.input,
    torch.gru: aten.gru.input,
    torch.rnn_tanh: aten.rnn_tanh.input,
    torch.rnn_relu: aten.rnn_relu.input,
}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def shapes_without_steps() -> Iterator[None]:
    """Lets Dynamo tell the shapes of a recurrent layer's results without following it in time.

    Dynamo computes with tensors without data, and would compile a step again for every length.
    """
    with ExitStack() as stack:
        for target in LAYERS.values():
            target._dispatch_cache.clear()
            shaped = _shaped(target, target.py_kernels.get(_COMPOSITE))
            stack.enter_context(replaced_entry(target.py_kernels, _COMPOSITE, shaped))
            stack.callback(target._dispatch_cache.clear)
        yield


def _shaped(target: torch._ops.OpOverload, own: Callable[..., Any] | None) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], FakeTensor) and not kwargs and len(args) == len(target._schema.arguments):
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            # What needs a gradient has to be seen.
            nothing = sum(leaf.sum() for leaf in given) * 0
            return tuple(result + nothing for result in results_of(*args))
        return own(*args, **kwargs) if own is not None else target._op_dk(_COMPOSITE, *args, **kwargs)

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
    """Tensors like the results: the output of every step in time, and the last state or states.

    Args:
        input: float[batch, length, width], or float[length, batch, width] where not `batch_first`.
        hx: float[layers * directions, batch, hidden], for an LSTM such a one and float[.., cells].
    """
    states = [hx] if isinstance(hx, torch.Tensor) else hx
    width = states[0].size(-1) * (2 if bidirectional else 1)
    output = input.new_empty(*input.shape[:2], width)
    return (output, *(torch.empty_like(state) for state in states))
