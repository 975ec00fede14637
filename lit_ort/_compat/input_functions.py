"""Values in a graph of Dynamo's that are functions of its inputs alone, and can be computed before the graph runs."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import skip_code

from lit_ort._compat.torch_sizes import hint_of

# Functions and methods that neither draw, nor write, nor take long.
_PURE = frozenset(
    "abs add all amax amin and any arange argmax argmin argsort argwhere as_tensor bincount bool broadcast_to cat "
    "ceil clamp clone concat contiguous count_nonzero cpu cumsum detach diff eq equal expand expand_as eye flatten "
    "flip float floor floordiv full full_like ge getitem gt int invert is_all_true isfinite isin isinf isnan item le "
    "len logical_and logical_not logical_or long lt masked_fill masked_select max maximum mean min minimum mod "
    "movedim mul narrow ne neg nelement new_full new_ones new_zeros nonzero not numel ones ones_like or permute pow "
    "prod remainder repeat repeat_interleave reshape roll round select size sort squeeze stack sub sum sym_size t "
    "tensor tile to topk transpose tril triu truediv unique unique_consecutive unsqueeze view view_as where xor zeros "
    "zeros_like "
    # Of this package, for packed sequences.
    "packed_batch_sizes packed_order packed_places packed_rows padded_lengths padded_places".split()
)
_MOST_NODES = 32
# Functions that update statistics.
_STATEFUL = ("batch_norm", "instance_norm")
_OPERATORS = frozenset({"or_", "and_", "not_"})
_IN_PLACE = frozenset(name for name in dir(operator) if name[:1] == "i" and hasattr(operator, f"__{name[1:]}__"))


@dataclasses.dataclass(frozen=True)
class InputFunction:
    """A value as a function of inputs.

    Args:
        compute: maps the inputs to the value.
        sources: where the inputs come from.
        value: the value for the inputs at hand.
    """

    compute: Callable[..., Any]
    sources: Sequence[Any]
    value: Any


def function_of_inputs(tx: Any, node: fx.Node, kind: Callable[[Any], Any]) -> InputFunction | None:
    """The function from inputs to `kind` of a node's value.

    Args:
        tx: Dynamo's translator.
        node: a node of the graph that is traced.
        kind: a function without side effects.

    Returns:
        the function; None if the value depends on weights, on draws or on values that the graph has changed.
    """
    if tx.output.current_tracer.parent is not None or tx.output.export:
        return None
    nodes = _behind(node)
    if nodes is None:
        return None
    sizes = {behind: size for behind in nodes if (size := _size_input(behind)) is not None}
    arguments = [behind.meta["grapharg"] for behind in nodes if behind.op == "placeholder"]
    compute = _function(nodes, node, kind, sizes)
    try:
        value = compute(*[hint_of(argument.example) for argument in arguments])
    except (RuntimeError, IndexError, ValueError):
        # As in eager, which raises it where the program computes the value.
        return None
    return InputFunction(compute, [argument.source for argument in arguments], value)


def _behind(node: fx.Node) -> list[fx.Node] | None:
    """The nodes that compute a value, in order, if they read unchanged inputs alone; otherwise None."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        found[current] = None
        size = _size_input(current)
        if size is not None:
            waiting.append(size)
            continue
        is_known = _is_input(current) if current.op == "placeholder" else _is_pure(current)
        if len(found) > _MOST_NODES or not is_known or not is_unchanged(current):
            return None
        waiting.extend(current.all_input_nodes)
    return [behind for behind in node.graph.nodes if behind in found]


def _size_input(node: fx.Node) -> fx.Node | None:
    """The input that is the same size as one that a node reads of any tensor; None if there is none."""
    example = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(example, torch.SymInt):
        return None
    expression = example.node.expr
    for other in node.graph.find_nodes(op="placeholder"):
        size = other.meta.get("example_value")
        if isinstance(size, torch.SymInt) and size.node.expr == expression and _is_input(other):
            return other
    return None


def _is_input(node: fx.Node) -> bool:
    """Whether a placeholder is a size, or a tensor that is no weight."""
    argument = node.meta.get("grapharg")
    if argument is None or argument.source is None or argument.pass_arg_as_tensor:
        return False
    example = argument.example
    if isinstance(example, torch.SymInt):
        return True
    return argument.is_tensor and type(example) is torch.Tensor and not example.requires_grad


def is_unchanged(node: fx.Node) -> bool:
    """Whether the graph has not changed a value in place so far. The node at hand may have no value yet."""
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor):
        return True
    # Tensors of inference mode don't count their versions.
    if example.is_inference():
        return not any(map(writes, node.graph.nodes))
    memory = memory_of_example(node)
    # Writes through `.data` are not counted either.
    return not example._version and not any(memory in map(memory_of_example, written) for written in _writes(node))


def memory_of_example(node: fx.Node) -> int | None:
    """The memory of a value's example; None if it has none."""
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return None
    return example.untyped_storage()._cdata


def _writes(node: fx.Node) -> Iterator[list[fx.Node]]:
    """What each node of a graph writes in place."""
    return (written_by(other) for other in node.graph.nodes if writes(other))


def written_by(node: fx.Node) -> list[fx.Node]:
    """The values that a node can write in place, if it writes."""
    if _writes_hidden(node):
        return node.all_input_nodes
    written: list[fx.Node] = []
    fx.map_arg((node.args[:1], node.kwargs.get("out"), node.kwargs.get("input")), written.append)
    return written


def writes(node: fx.Node) -> bool:
    """Whether a node writes in place."""
    if _writes_hidden(node):
        return True
    name = name_of_call(node)
    is_in_place = name in ("setitem", "__setitem__", "copy_") or (name[-1:] == "_" and not name.endswith("__"))
    return "out" in node.kwargs or (is_in_place and name not in _OPERATORS) or name in _IN_PLACE


def _writes_hidden(node: fx.Node) -> bool:
    """Whether a node writes into arguments other than the first, which versions of examples don't show."""
    schema = getattr(node.target, "_schema", None)
    return name_of_call(node).endswith(_STATEFUL) or (schema is not None and schema.is_mutable)


def name_of_call(node: fx.Node) -> str:
    """The name of the function or method that a node calls; empty if it has none."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_pure(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    name = name_of_call(node)
    return name.strip("_") in _PURE and (name.endswith("__") or name in _OPERATORS or name[-1:] != "_")


def _function(
    nodes: Sequence[fx.Node], result: fx.Node, kind: Callable[[Any], Any], sizes: Mapping[fx.Node, fx.Node]
) -> Callable[..., Any]:
    """The function of some nodes, whose arguments are the placeholders among them; `sizes` stand for other nodes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in sizes:
            # Its input comes before: placeholders are the first nodes.
            copies[node] = copies[sizes[node]]
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        # Examples would stay in memory.
        copies[node].meta.clear()
    graph.output(copies[result])
    module = fx.GraphModule({}, graph)

    def compute(*inputs: Any) -> Any:
        with torch.no_grad():
            return kind(module.forward(*inputs))

    for code in (compute.__code__, type(module).forward.__code__):
        # Dynamo would compile it where it is called before a graph.
        skip_code(code)
    return compute
