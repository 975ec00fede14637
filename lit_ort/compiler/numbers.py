"""Python numbers that change from step to step, such as an annealed weight or `self.global_step`, as tensor inputs.

Dynamo keeps such a number symbolic: an int is an input of its own, a float is a float64 tensor read with `item()`.
Where the number only enters arithmetic with tensors, it becomes a 0-d tensor, and one session serves every value.
Anything else (a size, an axis, a probability) stays a number, and each of its values is compiled by itself.

Numbers that a graph returns, such as a counter that the step advances, are computed in Python beside it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

_NUMBER_ARITHMETIC = frozenset({operator.add, operator.sub, operator.mul, operator.truediv, operator.neg})
_TENSOR_ARITHMETIC = _NUMBER_ARITHMETIC | {torch.add, torch.sub, torch.mul, torch.div, torch.true_divide}
_SYMBOLIC_FLOAT = (torch.sym_float, float)


@dataclasses.dataclass(frozen=True)
class NumberedGraph:
    """A graph whose numbers are settled.

    Args:
        module: the graph; its number inputs are tensors where that is possible.
        conversions: for a position among the graph's inputs, what turns Dynamo's argument into this graph's.
        returned: positions of the numbers among the graph's outputs; `module` returns None there.
        returns: from Dynamo's arguments to the values of these numbers.
    """

    module: fx.GraphModule
    conversions: dict[int, Callable[[Any], Any]]
    returned: tuple[int, ...] = ()
    returns: Callable[..., tuple[Any, ...]] | None = None

    def convert(self, arguments: Sequence[Any]) -> list[Any]:
        """Dynamo's arguments as this graph's."""
        converted = list(arguments)
        for position, conversion in self.conversions.items():
            converted[position] = conversion(converted[position])
        return converted


def settle_numbers(graph_module: fx.GraphModule) -> NumberedGraph:
    """Turns numbers into tensors where only arithmetic with tensors reads them, in a copy of the graph."""
    graph = copy_graph(graph_module)
    returned, returns = _take_returned_numbers(graph_module, graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    sizes = size_symbols(placeholders)
    conversions: dict[int, Callable[[Any], Any]] = {}
    for position, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt) and str(value) not in sizes and node.users:
            if _only_arithmetic(node):
                _make_tensor(node, torch.zeros((), dtype=torch.int64))
                conversions[position] = _int_tensor
        elif _is_number_in_tensor(node):
            conversions[position] = _settle_float(graph, node)
    graph.lint()
    return NumberedGraph(fx.GraphModule(graph_module, graph), conversions, returned, returns)


def copy_graph(graph_module: fx.GraphModule) -> fx.Graph:
    """A copy of a module's graph that may be changed; nodes keep their metadata."""
    graph = fx.Graph()
    result = graph.graph_copy(graph_module.graph, {})
    output = graph.output(result)
    output.meta = dict(next(node for node in graph_module.graph.nodes if node.op == "output").meta)
    return graph


def _take_returned_numbers(
    graph_module: fx.GraphModule, graph: fx.Graph
) -> tuple[tuple[int, ...], Callable[..., tuple[Any, ...]] | None]:
    """Moves the numbers that `graph` returns to a function of their own, unless they are computed from tensors."""
    output = next(node for node in graph.nodes if node.op == "output")
    values = output.args[0]
    assert isinstance(values, (tuple, list)), "Dynamo graphs return a tuple"
    positions = tuple(k for k, value in enumerate(values) if isinstance(value, fx.Node) and _is_number(value))
    beside = copy_graph(graph_module)
    other = next(node for node in beside.nodes if node.op == "output")
    theirs = other.args[0]
    assert isinstance(theirs, (tuple, list))
    other.args = (tuple(theirs[k] for k in positions),)
    # Only numbers are left in this copy, or it isn't used: nothing with an effect can be lost.
    beside.eliminate_dead_code()
    if not positions or any(node.op not in ("placeholder", "output") and not _is_number(node) for node in beside.nodes):
        return (), None
    output.args = (tuple(None if k in positions else value for k, value in enumerate(values)),)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and _is_number(node) and not node.users:
            graph.erase_node(node)
    return positions, fx.GraphModule(graph_module, beside).forward


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (int, float, torch.SymInt, torch.SymFloat))


def _settle_float(graph: fx.Graph, node: fx.Node) -> Callable[[Any], Any]:
    readers = list(node.users)
    if all(_only_arithmetic(reader) for reader in readers):
        for reader in readers:
            reader.replace_all_uses_with(node)
            graph.erase_node(reader)
        _make_tensor(node, torch.zeros(()))
        return _float_tensor
    for reader in readers:
        node.meta["example_value"] = reader.meta.get("example_value")
        reader.replace_all_uses_with(node)
        graph.erase_node(reader)
    return _item


def _int_tensor(value: int) -> torch.Tensor:
    return torch.tensor(value)


def _float_tensor(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float32)


def _item(value: torch.Tensor) -> float:
    return value.item()


def _is_number_in_tensor(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float64
        and value.dim() == 0
        and bool(node.users)
        and all(user.op == "call_method" and user.target == "item" for user in node.users)
    )


def size_symbols(placeholders: Sequence[fx.Node]) -> dict[str, tuple[fx.Node, int]]:
    """The symbols that are sizes of inputs: input and dimension of each."""
    found: dict[str, tuple[fx.Node, int]] = {}
    for node in placeholders:
        value = node.meta.get("example_value")
        for dimension, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                found.setdefault(str(size), (node, dimension))
    return found


def _only_arithmetic(node: fx.Node) -> bool:
    """Whether a number, and every number computed from it, only enters arithmetic that ends in tensors."""
    return all(_is_arithmetic(user) for user in node.users)


def _is_arithmetic(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if isinstance(node.meta.get("example_value"), torch.Tensor):
        return node.target in _TENSOR_ARITHMETIC
    return (node.target in _NUMBER_ARITHMETIC or node.target in _SYMBOLIC_FLOAT) and _only_arithmetic(node)


def _make_tensor(node: fx.Node, example: torch.Tensor) -> None:
    """Tells a number's node, and those of the numbers computed from it, that they are tensors now."""
    node.meta["example_value"] = example
    for user in node.users:
        if not isinstance(user.meta.get("example_value"), torch.Tensor):
            if user.target in _SYMBOLIC_FLOAT:
                user.target = torch.Tensor.float
            _make_tensor(user, torch.zeros(()))
