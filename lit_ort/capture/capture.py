"""Dynamo's graph of torch functions -> ATen operators at the sizes of one call, composite ones whole.

Composite operators (`linear`, `layer_norm`, `scaled_dot_product_attention`, `cross_entropy_loss`) are what fusions look
for; AOTAutograd takes apart those that are left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lit_ort._compat.torch import data_of, log_api_usage
from lit_ort._compat.torch_fx import WRONG_IN_A_TRACE, aten_graph, inputs_of
from lit_ort._compat.torch_ops import HigherOrderOperator, of_functorch
from lit_ort.capture.dimensions import changing_dimensions
from lit_ort.capture.examples import Examples, examples_of
from lit_ort.capture.numbers import NumberedGraph, copy_graph, size_symbols
from lit_ort.capture.places import source_line
from lit_ort.capture.vmaps import inline_vmaps
from lit_ort.errors import CaptureError


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph, ready for fusions.

    Args:
        module: its inputs are the tensors of `examples` alone.
        examples: what it was traced with.
        fusible: whether it is of ATen operators; a graph with higher-order operators is left as Dynamo made it.
    """

    module: fx.GraphModule
    examples: Examples
    fusible: bool


def capture(graph: NumberedGraph, tensors: Sequence[torch.Tensor], keys: Sequence[Any], any_sizes: bool) -> Captured:
    """Traces a graph for one call's types and sizes.

    Args:
        graph: its numbers apart.
        tensors, keys: one call's inputs.
        any_sizes: leave the sizes symbolic that Dynamo left symbolic.

    Raises:
        CaptureError: an input that sessions don't take. Whatever else tracing raises comes through as it is.
    """
    dimensions = changing_dimensions(graph.module) if any_sizes else None
    examples = examples_of(tensors, torch.is_grad_enabled(), dimensions)
    bound = _bind_numbers(graph, examples, keys)
    _settle_calls(bound.graph)
    inline_vmaps(bound, examples)
    if not _is_plain(bound.graph):
        _refuse_recurrent_dropout(bound.graph)
        return Captured(bound, examples, False)
    module = aten_graph(bound, examples.tensors, examples.mode)
    _refuse_wrong(module.graph)
    return Captured(module, examples, True)


def _refuse_wrong(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in WRONG_IN_A_TRACE:
            raise CaptureError(
                f"torch's own trace of {node.target} gives other numbers than the operator",
                remedy="It runs in eager until torch mends it.",
                operator=str(node.target),
                module=source_line(node),
            )


def _refuse_recurrent_dropout(graph: fx.Graph) -> None:
    """Where a graph is not of ATen operators, no fusion writes the dropout between recurrent layers, nor does torch."""
    for node in graph.nodes:
        if node.target in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu) and _drops(node):
            raise CaptureError(
                f"{node.name} drops values between its layers, in a graph with higher-order operators",
                remedy="Set its dropout to 0, or keep one of the two out of the step with torch.compiler.disable.",
                operator=str(node.target),
                module=source_line(node),
            )


def _drops(node: fx.Node) -> bool:
    """Whether a recurrent layer drops values: its one float is the probability, and behind it stands the mode."""
    pairs = zip(node.args, node.args[1:], strict=False)
    return any(isinstance(argument, float) and argument > 0 and bool(training) for argument, training in pairs)


def _bind_numbers(graph: NumberedGraph, examples: Examples, keys: Sequence[Any]) -> fx.GraphModule:
    """A copy of the graph with keys written into it, and sizes read from the tensors that have them."""
    copied = copy_graph(graph.module)
    placeholders = inputs_of(copied)
    count = len(examples.tensors)
    sizes = size_symbols(placeholders)
    for node in placeholders[count : count + len(graph.sizes)]:
        position, dimension = sizes[str(node.meta["example_value"])]
        size = examples.tensors[position].shape[dimension]
        if isinstance(size, torch.SymInt):
            with copied.inserting_after(placeholders[-1]):
                read = copied.call_function(torch.ops.aten.sym_size.int, (placeholders[position], dimension))
            node.replace_all_uses_with(read)
        else:
            _write(node, int(size))
        copied.erase_node(node)
    for node, key in zip(placeholders[count + len(graph.sizes) :], keys, strict=True):
        _write(node, key)
        copied.erase_node(node)
    return fx.GraphModule(graph.module, copied)


def _write(node: fx.Node, value: Any) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)


def _settle_calls(graph: fx.Graph) -> None:
    """Drops what Dynamo leaves of bookkeeping, and dropouts that return their input; writes `.data` as what tracing
    follows: it is a detached value.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is log_api_usage:
            graph.erase_node(node)
        elif node.target in (functional.dropout, torch.dropout):
            _settle_dropout(node)
        elif node.target is data_of:
            node.op, node.target = "call_method", "detach"


def _settle_dropout(node: fx.Node) -> None:
    """Replaces a dropout that drops nothing by its input, which is what eager returns; a trace makes a copy of it."""
    training = "training" if node.target is functional.dropout else "train"
    given: dict[str, Any] = {**dict(zip(("input", "p", training), node.args, strict=False)), **node.kwargs}
    if given.get("p", 0.5) == 0 or given.get(training, True) is False:
        node.replace_all_uses_with(given["input"])
        node.graph.erase_node(node)


def _is_plain(graph: fx.Graph) -> bool:
    """Whether a graph calls nothing that takes graphs, and nothing of functorch's levels."""
    for node in graph.nodes:
        if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
            return False
        if node.op == "call_function" and of_functorch(node.target):
            return False
    return True
