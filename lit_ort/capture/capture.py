"""Traces Dynamo's FX graph of torch functions to ATen operators, for the shapes of one call.

Composite operators (`linear`, `layer_norm`, `scaled_dot_product_attention`, `cross_entropy_loss`) are not decomposed,
because fusions match them. AOTAutograd decomposes those that no fusion replaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lit_ort._compat.torch import data_of, log_api_usage, memory_of, set_grad_enabled
from lit_ort._compat.torch_fx import (
    MISTRACED_OPERATORS,
    aten_graph,
    correct_strides,
    example_of,
    first_argument,
    graph_module_of,
    inputs_of,
)
from lit_ort._compat.torch_ops import (
    BY_STRIDES,
    SAFE_SPLITS,
    HigherOrderOperator,
    of_functorch,
    returns_alias,
    written_arguments,
)
from lit_ort.capture.dimensions import changing_dimensions
from lit_ort.capture.examples import Examples, examples_of
from lit_ort.capture.function_numbers import numbers_of_functions_to_tensors
from lit_ort.capture.input_sources import declare_tensors
from lit_ort.capture.locations import source_line
from lit_ort.capture.numbers import NumberedGraph, copy_graph, size_symbols
from lit_ort.capture.vmaps import inline_vmaps
from lit_ort.errors import CaptureError

# What Dynamo traces `tensor.data = other` as; since torch 2.14 the second.
_MEMORY_ASSIGNMENTS = frozenset({"set_", "shallow_copy_data_"})


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured graph, ready for fusions.

    Args:
        module: the graph; its inputs are the tensors of `examples` and nothing else, and each has its `Source` in
            `meta[SOURCE]`.
        examples: the fake tensors that it was traced with.
        fusible: whether it consists of ATen operators. A graph with higher-order operators stays as Dynamo produced it.
    """

    module: fx.GraphModule
    examples: Examples
    fusible: bool


def capture(graph: NumberedGraph, tensors: Sequence[torch.Tensor], keys: Sequence[Any], any_sizes: bool) -> Captured:
    """Traces a graph for the dtypes and shapes of one call.

    Args:
        graph: Dynamo's graph, with its numbers separated from its tensors.
        tensors, keys: the inputs of one call.
        any_sizes: keep symbolic sizes that Dynamo made symbolic; otherwise every size is fixed.

    Raises:
        CaptureError: an input is not supported by sessions, or torch traces an operator incorrectly. Other errors of
            tracing are not caught.
    """
    dimensions = changing_dimensions(graph.module) if any_sizes else None
    examples = examples_of(tensors, torch.is_grad_enabled() or _enables_gradients(graph.module.graph), dimensions)
    bound = _bind_numbers(graph, examples, keys)
    _refuse_replaced_memory(bound.graph)
    _canonicalize_calls(bound.graph)
    inline_vmaps(bound, examples)
    numbers_of_functions_to_tensors(bound)
    if not _is_plain(bound.graph):
        _refuse_recurrent_dropout(bound.graph)
        declare_tensors(bound.graph)
        return Captured(bound, examples, False)
    module = aten_graph(bound, examples.tensors, examples.mode)
    _refuse_incorrect_traces(module.graph)
    _refuse_places_in_storages(module.graph)
    _share_memory_of_parts(module.graph)
    changed = correct_strides(module.graph)
    if any(tensor.requires_grad for tensor in examples.tensors):
        _refuse_gradients_by_strides(module.graph, changed)
    declare_tensors(module.graph)
    return Captured(module, examples, True)


def _enables_gradients(graph: fx.Graph) -> bool:
    """Whether a part of the graph runs under `enable_grad`, also if the graph is called under `no_grad`."""
    return any(node.target is set_grad_enabled and node.args[0] for node in graph.nodes)


def _refuse_incorrect_traces(graph: fx.Graph) -> None:
    """Refuses operators that torch traces incorrectly.

    Raises:
        CaptureError: the graph has one.
    """
    windows: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_unfolded_with_gaps(node) or (returns_alias(node.target) and windows.intersection(node.all_input_nodes)):
            windows.add(node)
        if node.target in MISTRACED_OPERATORS or windows.intersection(written_arguments(node)):
            raise CaptureError(
                f"torch traces {node.target} incorrectly: the trace computes other values than the operator",
                remedy="The step runs in eager PyTorch until torch fixes it.",
                operator=str(node.target),
                module=source_line(node),
            )


def _refuse_places_in_storages(graph: fx.Graph) -> None:
    """Refuses views of inputs at a place in their storage, which a trace doesn't know, and which can change.

    Raises:
        CaptureError: there is one.
    """
    storages = {memory_of(value) for node in inputs_of(graph) if isinstance(value := example_of(node), torch.Tensor)}
    for node in graph.nodes:
        # The last argument is the strides, or the place after them.
        has_place = node.target in BY_STRIDES and not isinstance(node.args[-1], (list, tuple, NoneType))
        if has_place and memory_of(example_of(first_argument(node))) in storages:
            raise CaptureError(
                "as_strided is called with a storage_offset for a view of an input, whose own place in its storage can "
                "change",
                remedy="Leave it out, and pass the input from that place on.",
                operator=str(node.target),
                module=source_line(node),
            )


def _share_memory_of_parts(graph: fx.Graph) -> None:
    """Replaces splits whose results don't count as views by those whose results do, unless the graph writes into one:
    autograd refuses a write into the latter.
    """
    for node in graph.nodes:
        if node.target in SAFE_SPLITS and not any(map(written_arguments, _uses(node))):
            node.target = SAFE_SPLITS[node.target]


def _uses(node: fx.Node) -> list[fx.Node]:
    """The nodes that use a node's results."""
    return [user for element in node.users for user in element.users]


def _is_unfolded_with_gaps(node: fx.Node) -> bool:
    """Whether a node is a view with gaps between windows. A write into it would set the gaps to zero in a trace."""
    if node.target is not torch.ops.aten.unfold.default:
        return False
    _, _, size, step = node.args
    return not (isinstance(size, int) and isinstance(step, int) and step <= size)


def _refuse_replaced_memory(graph: fx.Graph) -> None:
    """Refuses assignments to `.data`: results can't become the memory of a tensor that other tensors may share.

    Raises:
        CaptureError: the graph has one.
    """
    for node in graph.nodes:
        if getattr(node.target, "__name__", node.target) in _MEMORY_ASSIGNMENTS:
            raise CaptureError(
                "the step assigns to tensor.data, which replaces the memory of a tensor",
                remedy="Write the values into the tensor with copy_ under torch.no_grad().",
                module=source_line(node),
            )


def _refuse_gradients_by_strides(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """Refuses `as_strided` of values whose strides torch traces incorrectly, since the traced gradient has them.

    Raises:
        CaptureError: there is one.
    """
    for node in graph.nodes:
        if node.target in BY_STRIDES and node.args[0] in changed:
            raise CaptureError(
                f"torch traces {node.args[0]} with other strides than eager, on which as_strided depends",
                remedy="Use reshape, permute or slices instead of as_strided.",
                operator=str(node.target),
                module=source_line(node),
            )


def _refuse_recurrent_dropout(graph: fx.Graph) -> None:
    """Refuses dropout between recurrent layers in a graph that has no ATen operators, since no fusion can rewrite it.

    Raises:
        CaptureError: a recurrent layer has a dropout probability above 0 in training mode.
    """
    for node in graph.nodes:
        if node.target in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu) and _drops(node):
            raise CaptureError(
                f"{node.name} has dropout between its layers, which is not supported in a graph with higher-order "
                "operators",
                remedy="Set its dropout to 0, or exclude the layer or the higher-order operator from the step with "
                "torch.compiler.disable.",
                operator=str(node.target),
                module=source_line(node),
            )


def _drops(node: fx.Node) -> bool:
    """Whether a recurrent layer applies dropout. Its only float argument is the probability; the next argument is the
    training mode.
    """
    pairs = zip(node.args, node.args[1:], strict=False)
    return any(isinstance(argument, float) and argument > 0 and bool(training) for argument, training in pairs)


def _bind_numbers(graph: NumberedGraph, examples: Examples, keys: Sequence[Any]) -> fx.GraphModule:
    """A copy of the graph with keys as constants, and with sizes read from the tensors that have them."""
    copied = copy_graph(graph.module)
    placeholders = inputs_of(copied)
    count = len(examples.tensors)
    sizes = size_symbols(placeholders)
    for node in placeholders[count : count + graph.sizes]:
        position, dimension = sizes[str(node.meta["example_value"])]
        size = examples.tensors[position].shape[dimension]
        if isinstance(size, torch.SymInt):
            with copied.inserting_after(placeholders[-1]):
                sym_size = copied.call_function(torch.ops.aten.sym_size.int, (placeholders[position], dimension))
            node.replace_all_uses_with(sym_size)
        else:
            _replace_by_value(node, int(size))
        copied.erase_node(node)
    for node, key in zip(placeholders[count + graph.sizes :], keys, strict=True):
        _replace_by_value(node, key)
        copied.erase_node(node)
    return graph_module_of(graph.module, copied)


def _replace_by_value(node: fx.Node, value: Any) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)


def _canonicalize_calls(graph: fx.Graph) -> None:
    """Removes calls of API logging and dropouts that return their input, and replaces `.data` by `detach`, which can be
    traced.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is log_api_usage:
            graph.erase_node(node)
        elif node.target in (functional.dropout, torch.dropout):
            _remove_idle_dropout(node)
        elif node.target is data_of:
            node.op, node.target = "call_method", "detach"


def _remove_idle_dropout(node: fx.Node) -> None:
    """Replaces a dropout that drops nothing by its input. Eager returns the input itself; a trace would copy it."""
    training = "training" if node.target is functional.dropout else "train"
    arguments: dict[str, Any] = {**dict(zip(("input", "p", training), node.args, strict=False)), **node.kwargs}
    if arguments.get("p", 0.5) == 0 or arguments.get(training, True) is False:
        node.replace_all_uses_with(arguments["input"])
        node.graph.erase_node(node)


def _is_plain(graph: fx.Graph) -> bool:
    """Whether a graph has neither higher-order operators nor functions of functorch's levels."""
    for node in graph.nodes:
        if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
            return False
        if node.op == "call_function" and of_functorch(node.target):
            return False
    return True
