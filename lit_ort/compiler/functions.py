"""Gradients that a user wrote, as `torch.autograd.Function`: each call of one is a node that PyTorch runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply

from lit_ort.compiler.kernels.torch_call import FUNCTION, TorchCall, words_for
from lit_ort.compiler.torch_calls import emit
from lit_ort.errors import CaptureError

Function = Callable[..., Any]


def settle_functions(graph: fx.Graph, owner: torch.nn.Module) -> tuple[Function, ...]:
    """Writes calls of the user's functions as what an export makes a node of; returns the functions, in order.

    Args:
        owner: the module whose attributes the graph reads: Dynamo's forward and backward of each function.

    Raises:
        CaptureError: a function that changes its inputs in place, or takes or gives something other than tensors whose
            sizes and types are known.
    """
    found: list[Function] = []
    for node in list(graph.nodes):
        if node.target is autograd_function_apply:
            forward, backward, *given = node.args
            _require_plain(node, given)
            graphs = [getattr(owner, str(part.target)) for part in (forward, backward)]
            found.append(_Applied(graphs, node.kwargs))
            node.target, node.args, node.kwargs = _call_of(len(found) - 1, node), tuple(given), {}
            for part in (forward, backward):
                if not part.users:
                    graph.erase_node(part)
    return tuple(found)


class _Applied:
    """A function with the two graphs that Dynamo made of it."""

    def __init__(self, graphs: list[fx.GraphModule], settings: Any) -> None:
        self._graphs = graphs
        self._settings = dict(settings)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return autograd_function_apply(*self._graphs, *tensors, **self._settings)


def _call_of(position: int, node: fx.Node) -> Callable[..., Any]:
    example = node.meta["example_value"]
    results = (example,) if isinstance(example, torch.Tensor) else tuple(example)

    def call(*tensors: torch.Tensor) -> Any:
        inputs: list[torch.Tensor] = []
        words = words_for(tensors, inputs)
        made = emit(TorchCall(f"{FUNCTION}{position}", words, {}, tuple(range(len(results)))), inputs, results)
        return made[0] if isinstance(example, torch.Tensor) else tuple(made)

    return call


def _require_plain(node: fx.Node, given: list[Any]) -> None:
    example = node.meta["example_value"]
    values = [part.meta.get("example_value") if isinstance(part, fx.Node) else part for part in given]
    values += [example] if isinstance(example, torch.Tensor) else list(example)
    plain = all(isinstance(value, torch.Tensor) and _is_known(value) for value in values)
    if not plain or node.kwargs.get("dirty_idx"):
        raise CaptureError(
            "the graph has an autograd.Function that changes its inputs, computes in bfloat16, or takes or gives "
            "something other than tensors of known sizes",
            remedy="Call it outside of the compiled step, or give it such tensors.",
            operator=str(node.target),
        )


def _is_known(value: torch.Tensor) -> bool:
    return value.dtype != torch.bfloat16 and all(isinstance(size, int) for size in value.shape)
