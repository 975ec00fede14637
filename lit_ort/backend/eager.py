"""Runs a graph in eager PyTorch: as a fallback, and as the reference of verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import checkpoint

from lit_ort._compat.devices import CPU, device_of
from lit_ort._compat.torch import enter_autocast, exit_autocast
from lit_ort._compat.torch_fx import graph_module_of, returned_by
from lit_ort._compat.value_checks import FAILED
from lit_ort.capture.inlined_checkpoints import CHECKPOINT
from lit_ort.capture.numbers import copy_graph
from lit_ort.options import BF16_MIXED
from lit_ort.runtime.program import tensors_of
from lit_ort.runtime.random import in_eager


def autocast_of(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype in which a graph computes matmuls: that of the autocast around it, otherwise that of the options."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.bfloat16 if precision == BF16_MIXED else None


def autocast_for(precision: str, device: torch.device = CPU) -> AbstractContextManager[Any]:
    """The autocast context for a step of a precision, so that its code sees the same dtypes as in eager.

    As Lightning's, it keeps no weights in bfloat16: a step with manual optimization changes them.
    """
    is_low = precision == BF16_MIXED
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if is_low else nullcontext()


def run_in_eager(graph_module: fx.GraphModule, arguments: Sequence[Any], precision: str) -> Any:
    """Runs a graph, under autocast if the precision needs it. The outputs have the dtypes that Dynamo expects."""
    try:
        return _run(graph_module, _call_of(graph_module), arguments, precision)
    except (IndexError, RuntimeError):
        raise_for_failed_check(graph_module, arguments, precision)
        raise


class FailedCheck(Exception):
    """A check of the program has failed, and a later operator has raised an error.

    Args:
        outputs: the graph's outputs; None for those behind the check. The program raises the check's exception.
    """

    def __init__(self, outputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.outputs = outputs


def raise_for_failed_check(graph_module: fx.GraphModule, arguments: Sequence[Any], precision: str) -> None:
    """Runs a graph that has raised an error as far as to a check of the program that fails, if it has checks.

    Raises:
        FailedCheck: there is one.
    """
    if any(FAILED in node.meta for node in graph_module.graph.nodes):
        interpreter = _ToFailedCheck(graph_module, garbage_collect_values=False)
        with suppress(IndexError, RuntimeError):
            _run(graph_module, interpreter.run, arguments, precision)


class _Interpreter(fx.Interpreter):
    """Runs a graph with activation checkpoints, whose recomputation draws the numbers of the forward again.

    torch's operator for a checkpoint leaves the state of the generator to compilers.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not CHECKPOINT:
            return super().call_function(target, args, kwargs)
        body, *given = args
        context = body.meta.get("_checkpoint_context_fn")
        options = {**kwargs, "use_reentrant": False, **({} if context is None else {"context_fn": context})}
        return checkpoint.checkpoint(lambda *inputs: _Interpreter(body).run(*inputs), *given, **options)


def _call_of(graph_module: fx.GraphModule) -> Callable[..., Any]:
    has_checkpoints = any(node.target is CHECKPOINT for node in graph_module.graph.nodes)
    return _Interpreter(graph_module).run if has_checkpoints else graph_module


class _ToFailedCheck(_Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if FAILED in n.meta and value:
            self.env[n] = value
            raise FailedCheck(tuple(map(self.env.get, returned_by(n.graph))))
        return value


def _run(graph_module: fx.GraphModule, run: Callable[..., Any], arguments: Sequence[Any], precision: str) -> Any:
    device = device_of(tensors_of(arguments))
    if precision != BF16_MIXED or torch.is_autocast_enabled(device.type):
        with in_eager(device):
            return run(*arguments)
    with autocast_for(precision, device), in_eager(device):
        outputs = run(*arguments)
    examples = returned_by(graph_module.graph)
    return tuple(_as_example(value, example) for value, example in zip(outputs, examples, strict=True))


def in_float32(graph_module: fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """Runs a graph without autocast, with float32 in place of every bfloat16."""
    return _in_wider(graph_module, arguments, torch.bfloat16, torch.float32)


def in_float64(graph_module: fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """Runs a graph without autocast, with float64 in place of every float32."""
    return _in_wider(graph_module, arguments, torch.float32, torch.float64)


# The methods of tensors that convert to a dtype.
_CONVERSIONS = {torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}


def _in_wider(graph_module: fx.GraphModule, arguments: Sequence[Any], narrow: torch.dtype, wide: torch.dtype) -> Any:
    def widened(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(wide) if value.dtype is narrow else value
        return wide if value is narrow else value

    graph = copy_graph(graph_module)
    for node in reversed(list(graph.nodes)):
        if node.target in (enter_autocast, exit_autocast):
            graph.erase_node(node)
        elif node.op == "call_method" and node.target == _CONVERSIONS[narrow]:
            node.target = _CONVERSIONS[wide]
        elif node.op not in ("placeholder", "output"):
            node.args = map_aggregate(node.args, widened)
            node.kwargs = map_aggregate(node.kwargs, widened)
    with torch.autocast(device_of(tensors_of(arguments)).type, enabled=False):
        return _call_of(graph_module_of(graph_module, graph))(*map(widened, arguments))


def _as_example(value: Any, example: Any) -> Any:
    expected = example.meta.get("example_value") if isinstance(example, fx.Node) else None
    return value.to(expected.dtype) if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor) else value
