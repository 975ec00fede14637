"""Python numbers that change from step to step, such as an annealed weight or `self.global_step`, as tensor inputs.

Dynamo keeps such a number symbolic: an int is an input of its own, a float is a float64 tensor read with `item()`.
What is computed from numbers alone is computed in Python at every call, in double precision. Where such a number then
only enters arithmetic with tensors, or is a tensor by itself (Dynamo returns a logged float as one), it becomes a 0-d
tensor, and one session serves every value. Anything else (a size,
an axis, a probability) is a key, and each of its values is compiled by itself.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import ancestors_of, inputs_of, output_of, returned_by

_ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.iadd, operator.isub, operator.imul}
    | {operator.itruediv, torch.add, torch.sub, torch.mul, torch.div, torch.true_divide}
)
_METHODS = frozenset({"add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_"})
# Python numbers enter arithmetic in float32 where the result is narrower.
_NARROW = frozenset({torch.bfloat16, torch.float16})


@dataclasses.dataclass(frozen=True)
class NumberedGraph:
    """A graph whose inputs are tensors, numbers as tensors, sizes and keys, in this order.

    Args:
        module: the graph.
        tensors: positions of its tensor inputs among Dynamo's.
        dtypes: of the numbers that became tensors.
        sizes: positions of Dynamo's inputs that are sizes of tensors.
        keys: how many numbers are keys.
        returned: positions of the numbers among the graph's outputs; `module` returns None there.
        numbers: from Dynamo's arguments to the numbers that became tensors, the keys and those returned; None where
            there are none.
    """

    module: fx.GraphModule
    tensors: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]
    keys: int
    returned: tuple[int, ...]
    numbers: Callable[..., tuple[Any, ...]] | None

    def arguments(self, given: Sequence[Any]) -> tuple[list[torch.Tensor], tuple[Any, ...], tuple[Any, ...]]:
        """Dynamo's arguments as this graph's tensors, its keys, and the numbers that it returns."""
        tensors = [given[position] for position in self.tensors]
        if self.numbers is None:
            return tensors, (), ()
        values = self.numbers(*given)
        count = len(self.dtypes)
        tensors += [torch.tensor(v, dtype=t) for v, t in zip(values[:count], self.dtypes, strict=True)]
        return tensors, values[count : count + self.keys], values[count + self.keys :]

    def module_arguments(self, tensors: Sequence[torch.Tensor], keys: Sequence[Any]) -> list[Any]:
        """What `module` is called with, for its tensors and keys: the sizes in between are those of the tensors."""
        placeholders = inputs_of(self.module.graph)
        where = size_symbols(placeholders)
        symbols = placeholders[len(tensors) : len(tensors) + len(self.sizes)]
        places = [where[str(_value(node))] for node in symbols]
        return [*tensors, *(tensors[position].shape[dimension] for position, dimension in places), *keys]


def separate_numbers(graph_module: fx.GraphModule) -> NumberedGraph:
    """Moves what is computed from numbers alone out of a copy of the graph."""
    graph = copy_graph(graph_module)
    placeholders = inputs_of(graph)
    originals = {copied: original for copied, original in zip(graph.nodes, graph_module.graph.nodes, strict=True)}
    sizes = size_symbols(placeholders)
    free = _free_numbers(graph, sizes)
    tensors = [k for k, node in enumerate(placeholders) if _is_tensor(node) and node not in free]
    of_sizes = [k for k, node in enumerate(placeholders) if str(_value(node)) in sizes and node.users]
    as_tensors, keys = _uses(graph, free)
    returned, positions = _returned(graph)
    wanted = [originals[node] for node in (*(number for number, _ in as_tensors), *keys, *returned)]
    numbers = _number_program(graph_module, wanted) if wanted else None
    made = [_number_input(graph, number, dtype, users) for (number, dtype), users in as_tensors.items()]
    made_keys = [_key_input(graph, node, free) for node in keys]
    _drop_free(graph, free)
    ordered = [*(placeholders[k] for k in tensors), *made, *(placeholders[k] for k in of_sizes), *made_keys]
    _order_placeholders(graph, ordered)
    graph.lint()
    dtypes = tuple(dtype for _, dtype in as_tensors)
    return NumberedGraph(
        fx.GraphModule(graph_module, graph), tuple(tensors), dtypes, tuple(of_sizes), len(keys), positions, numbers
    )


def copy_graph(graph_module: fx.GraphModule) -> fx.Graph:
    """A copy of a module's graph that may be changed; nodes keep their metadata."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(graph_module.graph, {}))
    output.meta = dict(output_of(graph_module.graph).meta)
    return graph


def size_symbols(placeholders: Sequence[fx.Node]) -> dict[str, tuple[int, int]]:
    """The symbols that are sizes of inputs: input and dimension of each."""
    found: dict[str, tuple[int, int]] = {}
    for position, node in enumerate(placeholders):
        value = _value(node)
        for dimension, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                found.setdefault(str(size), (position, dimension))
    return found


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(_value(node), torch.Tensor)


def _is_number(node: fx.Node) -> bool:
    return isinstance(_value(node), (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _free_numbers(graph: fx.Graph, sizes: dict[str, tuple[int, int]]) -> set[fx.Node]:
    """The numbers that Dynamo hands over and that are no sizes, and what is computed from them alone."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            wraps = _is_wrapped_float(node)
            if wraps or (_is_number(node) and str(_value(node)) not in sizes and node.users):
                free.add(node)
        elif _is_number(node) and any(argument in free for argument in node.all_input_nodes):
            if all(argument in free or _is_number(argument) for argument in node.all_input_nodes):
                free.add(node)
    return free


def _is_wrapped_float(node: fx.Node) -> bool:
    value = _value(node)
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float64
        and value.dim() == 0
        and bool(node.users)
        and all(user.op == "call_method" and user.target == "item" for user in node.users)
    )


def _uses(
    graph: fx.Graph, free: set[fx.Node]
) -> tuple[dict[tuple[fx.Node, torch.dtype], list[fx.Node]], list[fx.Node]]:
    """Which free numbers enter arithmetic with tensors, by type, with their users; and which do anything else."""
    as_tensors: dict[tuple[fx.Node, torch.dtype], list[fx.Node]] = {}
    keys: dict[fx.Node, None] = {}
    for node in graph.nodes:
        for user in node.users if node in free and _is_number(node) else ():
            if user in free or user.op == "output":
                continue
            dtype = _arithmetic_type(user, node)
            if dtype is None:
                keys[node] = None
            else:
                as_tensors.setdefault((node, dtype), []).append(user)
    return as_tensors, list(keys)


def _arithmetic_type(user: fx.Node, number: fx.Node) -> torch.dtype | None:
    """The type in which a number enters a tensor's arithmetic or becomes one, or None where it does something else."""
    value = _value(user)
    if user.target is torch.scalar_tensor and isinstance(value, torch.Tensor):
        return value.dtype
    known = user.target in _ARITHMETIC if user.op == "call_function" else user.target in _METHODS
    if not known or user.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor):
        return None
    if len(user.args) != 2 or user.kwargs or list(user.args).count(number) != 1:
        return None
    if value.dtype == torch.bool or value.is_complex():
        return None
    return torch.float32 if value.dtype in _NARROW and value.dim() > 0 else value.dtype


def _returned(graph: fx.Graph) -> tuple[list[fx.Node], tuple[int, ...]]:
    """The numbers that a graph returns, which it then no longer does."""
    values = returned_by(graph)
    positions = tuple(k for k, value in enumerate(values) if isinstance(value, fx.Node) and _is_number(value))
    nodes = [values[k] for k in positions]
    output_of(graph).args = (tuple(None if k in positions else value for k, value in enumerate(values)),)
    return nodes, positions


def _number_program(graph_module: fx.GraphModule, wanted: list[fx.Node]) -> Callable[..., tuple[Any, ...]]:
    """A function from Dynamo's arguments to some of its numbers.

    Raises:
        ValueError: one of them is computed from tensors.
    """
    program = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    needed = ancestors_of(wanted) | set(wanted)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" or node in needed:
            if node.op != "placeholder" and not _is_number(node):
                raise ValueError(f"the number {wanted[0].name} is computed from tensors")
            copies[node] = program.node_copy(node, copies.__getitem__)
    program.output(tuple(copies[node] for node in wanted))
    return fx.GraphModule(graph_module, program).forward


def _input_before(graph: fx.Graph, name: str, example: Any) -> fx.Node:
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        node = graph.placeholder(name)
    node.meta["example_value"] = example
    return node


def _number_input(graph: fx.Graph, number: fx.Node, dtype: torch.dtype, users: list[fx.Node]) -> fx.Node:
    """A 0-d tensor in a number's place among the arguments of some of its users."""
    name = f"number_{number.name}_{str(dtype).removeprefix('torch.')}"
    node = _input_before(graph, name, torch.zeros((), dtype=dtype))
    for user in users:
        if user.target is torch.scalar_tensor:
            user.replace_all_uses_with(node)
            graph.erase_node(user)
        else:
            user.replace_input_with(number, node)
    return node


def _key_input(graph: fx.Graph, number: fx.Node, free: set[fx.Node]) -> fx.Node:
    """An input of its own in a number's place, wherever it is no number's argument."""
    node = _input_before(graph, f"key_{number.name}", _value(number))
    number.replace_all_uses_with(node, delete_user_cb=lambda user: user not in free and user is not node)
    return node


def _drop_free(graph: fx.Graph, free: set[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if node in free and not node.users:
            graph.erase_node(node)
        elif node.op == "call_function" and _is_number(node) and not node.users:
            graph.erase_node(node)


def _order_placeholders(graph: fx.Graph, ordered: list[fx.Node]) -> None:
    """Puts the inputs into an order, and drops those that are not among them."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and node not in ordered and not node.users:
            graph.erase_node(node)
    for node in reversed(ordered):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)
