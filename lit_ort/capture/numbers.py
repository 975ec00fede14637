"""Turns Python numbers that change between steps, such as an annealed weight or `self.global_step`, into tensor inputs.

Dynamo makes such a number symbolic: an int is a separate input, a float is a float64 tensor that is read with `item()`.
Expressions of numbers alone are computed in Python at every call, in double precision. A number becomes a 0-d tensor
if it is used only in arithmetic and comparisons with tensors, or is part of one (Dynamo returns a logged float as a
tensor); one session is then valid for every value. An int that is used as a size becomes the size of an input, see
`number_lengths`. Any other number (an axis, a probability) is a key, and the graph is compiled separately for each of
its values.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lit_ort._compat.devices import device_of
from lit_ort._compat.torch_fx import (
    TENSORS_OF_NUMBERS,
    ancestors_of,
    graph_module_of,
    inputs_of,
    output_of,
    returned_by,
)
from lit_ort.capture.number_lengths import add_length_inputs, lengths_among
from lit_ort.capture.number_settings import write_settings_as_arithmetic

_ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.iadd, operator.isub, operator.imul}
    | {operator.itruediv, torch.add, torch.sub, torch.mul, torch.div, torch.true_divide}
)
_IN_PLACE: Mapping[Any, Any] = MappingProxyType(
    {
        operator.iadd: operator.add,
        operator.isub: operator.sub,
        operator.imul: operator.mul,
        operator.itruediv: operator.truediv,
    }
)
_COMPARISONS = frozenset(
    getattr(module, name) for module in (operator, torch) for name in ("gt", "lt", "ge", "le", "eq", "ne")
) | frozenset({"gt", "lt", "ge", "le", "eq", "ne"})
# The positions at which operators take a number or a tensor without dimensions.
_CHOICES: Mapping[Any, tuple[int, ...]] = MappingProxyType(
    {torch.where: (1, 2), "where": (2,), torch.lerp: (2,), "lerp": (2,), "lerp_": (2,)}
    | dict.fromkeys((torch.masked_fill, "masked_fill", "masked_fill_"), (2,))
)
_METHODS = frozenset({"add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_"})
# If the result is narrower than float32, a Python number takes part in the arithmetic in float32.
_NARROW = frozenset({torch.bfloat16, torch.float16})


class NegativeLengthError(ValueError):
    """An int that a graph uses as a size is negative, so that no tensor can have it as its size."""


@dataclasses.dataclass(frozen=True)
class NumberedGraph:
    """A graph whose inputs are tensors, numbers as tensors, lengths, sizes and keys, in this order.

    Args:
        module: the graph.
        tensors: positions of its tensor inputs among Dynamo's inputs.
        dtypes: dtypes of the numbers that became tensors.
        lengths: the number of tensors without elements, whose first size is an int.
        sizes: the number of inputs that are sizes of tensors.
        keys: the number of keys.
        returned: positions of the numbers among the graph's outputs; `module` returns None at these positions.
        numbers: computes, from Dynamo's arguments, the numbers that became tensors, the lengths, the keys, and the
            returned numbers; None if there are no numbers.
    """

    module: fx.GraphModule
    tensors: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    lengths: int
    sizes: int
    keys: int
    returned: tuple[int, ...]
    numbers: Callable[..., tuple[Any, ...]] | None

    def arguments(self, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], tuple[Any, ...], tuple[Any, ...]]:
        """Split Dynamo's arguments into the tensors of this graph, its keys, and the numbers that it returns.

        Raises:
            NegativeLengthError: an int that is used as a size is negative.
        """
        tensors = [inputs[position] for position in self.tensors]
        if self.numbers is None:
            return tensors, (), ()
        values = self.numbers(*inputs)
        count = len(self.dtypes)
        lengths, others = values[count : count + self.lengths], values[count + self.lengths :]
        tensors += map(_tensor_of, values[:count], self.dtypes)
        tensors += _without_elements(lengths, device_of(tensors)) if lengths else ()
        return tensors, others[: self.keys], others[self.keys :]

    @property
    def length_inputs(self) -> range:
        """The positions of the lengths among the tensors of this graph."""
        start = len(self.tensors) + len(self.dtypes)
        return range(start, start + self.lengths)

    def module_arguments(self, tensors: Sequence[torch.Tensor], keys: Sequence[Any]) -> list[Any]:
        """Return the arguments of `module`: the tensors, their sizes, and the keys."""
        placeholders = inputs_of(self.module.graph)
        symbols = size_symbols(placeholders)
        size_inputs = placeholders[len(tensors) : len(tensors) + self.sizes]
        sizes = [symbols[str(_value(node))] for node in size_inputs]
        return [*tensors, *(tensors[position].shape[dimension] for position, dimension in sizes), *keys]


def _tensor_of(value: Any, dtype: torch.dtype) -> torch.Tensor:
    # An integer that doesn't fit wraps around, as in arithmetic with a number.
    wide = dtype if dtype.is_floating_point else {float: torch.float64, complex: torch.complex128}.get(type(value))
    return torch.tensor(value, dtype=wide).to(dtype)


def _without_elements(lengths: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    if min(lengths) < 0:
        raise NegativeLengthError
    return [torch.empty(length, 0, device=device) for length in lengths]


def separate_numbers(graph_module: fx.GraphModule, lengths: bool = False) -> NumberedGraph:
    """Return a copy of the graph without the expressions that are computed from numbers alone.

    Args:
        graph_module: Dynamo's graph.
        lengths: keep ints that are used as sizes in the graph, as sizes of inputs that are added.
    """
    graph = copy_graph(graph_module)
    placeholders = inputs_of(graph)
    originals = {copied: original for copied, original in zip(graph.nodes, graph_module.graph.nodes, strict=True)}
    sizes = size_symbols(placeholders)
    free = _free_numbers(graph, sizes)
    write_settings_as_arithmetic(graph, free)
    tensors = [k for k, node in enumerate(placeholders) if _is_tensor(node) and node not in free]
    size_inputs = [node for node in placeholders if str(_value(node)) in sizes and node.users]
    as_tensors, keys = _uses(graph, free)
    kept = lengths_among(keys, free) if lengths else {}
    keys = [node for node in keys if node not in kept]
    origins = set[fx.Node]().union(*kept.values())
    length_nodes = [node for node in graph.nodes if node in origins]
    returned, positions = _take_returned_numbers(graph)
    used = (*(number for number, _ in as_tensors), *length_nodes, *keys, *returned)
    numbers = _number_program(graph_module, [originals[node] for node in used]) if used else None
    number_inputs = [_number_input(graph, number, dtype, users) for (number, dtype), users in as_tensors.items()]
    _stack_numbers(graph, set(number_inputs))
    length_inputs, length_sizes = add_length_inputs(graph, length_nodes)
    key_inputs = [_key_input(graph, node, free) for node in keys]
    _drop_free(graph, free)
    ordered = [
        *(placeholders[k] for k in tensors),
        *number_inputs,
        *length_inputs,
        *size_inputs,
        *length_sizes,
        *key_inputs,
    ]
    _order_placeholders(graph, ordered)
    graph.lint()
    return NumberedGraph(
        graph_module_of(graph_module, graph),
        tensors=tuple(tensors),
        dtypes=tuple(dtype for _, dtype in as_tensors),
        lengths=len(length_inputs),
        sizes=len(size_inputs) + len(length_sizes),
        keys=len(keys),
        returned=positions,
        numbers=numbers,
    )


def copy_graph(graph_module: fx.GraphModule) -> fx.Graph:
    """Return a copy of a module's graph; its nodes keep their metadata, except for Dynamo's references to tensors."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(graph_module.graph, {}))
    output.meta = dict(output_of(graph_module.graph).meta)
    for node in inputs_of(graph):
        # A weak reference to a parameter prevents torch.utils.swap_tensors.
        node.meta.pop("grapharg", None)
    return graph


def size_symbols(placeholders: Sequence[fx.Node]) -> dict[str, tuple[int, int]]:
    """The symbols that are sizes of inputs, each with the position of the input and the dimension."""
    symbols: dict[str, tuple[int, int]] = {}
    for position, node in enumerate(placeholders):
        value = _value(node)
        for dimension, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                symbols.setdefault(str(size), (position, dimension))
    return symbols


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(_value(node), torch.Tensor)


def _is_number(node: fx.Node) -> bool:
    return isinstance(_value(node), (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _free_numbers(graph: fx.Graph, sizes: dict[str, tuple[int, int]]) -> set[fx.Node]:
    """Dynamo's number inputs, except for sizes, and the numbers that are computed from these inputs alone."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            is_wrapped = _is_wrapped_float(node)
            if is_wrapped or (_is_number(node) and str(_value(node)) not in sizes and node.users):
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
    """The uses of free numbers.

    Returns:
        The users in arithmetic with tensors, by number and dtype, and the numbers that have any other use.
    """
    as_tensors: dict[tuple[fx.Node, torch.dtype], list[fx.Node]] = {}
    keys: dict[fx.Node, None] = {}
    for node in graph.nodes:
        for user in node.users if node in free and _is_number(node) else ():
            if user in free or user.op == "output":
                continue
            dtype = arithmetic_dtype(user, node)
            if dtype is None or (_is_tensor_of_numbers(user) and not free.issuperset(user.all_input_nodes)):
                keys[node] = None
            else:
                as_tensors.setdefault((node, dtype), []).append(user)
    return as_tensors, list(keys)


def _is_tensor_of_numbers(node: fx.Node) -> bool:
    """Whether a node makes a tensor of a number, or of numbers in lists."""
    return node.target in TENSORS_OF_NUMBERS and _is_tensor(node) and not node.kwargs.get("requires_grad")


def arithmetic_dtype(user: fx.Node, number: fx.Node) -> torch.dtype | None:
    """The dtype of a number in arithmetic with a tensor, or as a tensor itself; None for any other use."""
    value = _value(user)
    if _is_tensor_of_numbers(user):
        return value.dtype
    if user.target in _COMPARISONS:
        return _compared_dtype(user, number)
    if user.target in _CHOICES:
        return _chosen_dtype(user, number)
    is_arithmetic = user.target in _ARITHMETIC if user.op == "call_function" else user.target in _METHODS
    if not is_arithmetic or user.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor):
        return None
    if len(user.args) != 2 or user.kwargs or list(user.args).count(number) != 1:
        return None
    if value.dtype == torch.bool or value.is_complex():
        return None
    if value.dtype not in _NARROW:
        return value.dtype
    # Eager computes with the number in float32. Beside a tensor without dimensions, or of integers, a float32 tensor
    # would change the dtype of the result.
    tensor = next(argument for argument in user.args if argument is not number)
    is_of_result = isinstance(tensor, fx.Node) and _value(tensor).dtype == value.dtype and _value(tensor).dim() > 0
    return torch.float32 if is_of_result else None


def _compared_dtype(user: fx.Node, number: fx.Node) -> torch.dtype | None:
    """The dtype in which torch compares a number with a tensor: that of the tensor, if the number is of its kind."""
    if len(user.args) != 2 or user.kwargs or list(user.args).count(number) != 1:
        return None
    other = next(argument for argument in user.args if argument is not number)
    tensor, is_integer = _value(other) if isinstance(other, fx.Node) else None, isinstance(_value(number), torch.SymInt)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype in (torch.bool, torch.uint8) or tensor.is_complex():
        return None
    return tensor.dtype if tensor.is_floating_point() or (is_integer and tensor.dtype == torch.int64) else None


def _chosen_dtype(user: fx.Node, number: fx.Node) -> torch.dtype | None:
    """The dtype of a number that is an operand or a value of a result."""
    value, positions = _value(user), [k for k, argument in enumerate(user.args) if argument is number]
    if user.kwargs or len(positions) != 1 or positions[0] not in _CHOICES[user.target] or len(user.args) != 3:
        return None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    # Interpolations compute in float32, also those of narrower dtypes.
    is_interpolation = user.target in (torch.lerp, "lerp", "lerp_")
    return None if is_interpolation and value.dtype in _NARROW else value.dtype


def _take_returned_numbers(graph: fx.Graph) -> tuple[list[fx.Node], tuple[int, ...]]:
    """Replaces the numbers among a graph's outputs by None. Returns their nodes and their positions."""
    values = returned_by(graph)
    positions = tuple(k for k, value in enumerate(values) if isinstance(value, fx.Node) and _is_number(value))
    nodes = [values[k] for k in positions]
    output_of(graph).args = (tuple(None if k in positions else value for k, value in enumerate(values)),)
    return nodes, positions


def _number_program(graph_module: fx.GraphModule, numbers: list[fx.Node]) -> Callable[..., tuple[Any, ...]]:
    """A function from Dynamo's arguments to the values of these numbers.

    Raises:
        ValueError: a number is computed from tensors.
    """
    program = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    needed = ancestors_of(numbers) | set(numbers)
    inputs = inputs_of(graph_module.graph)
    sizes = size_symbols(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            copies[node] = program.node_copy(node)
        elif node in needed and _is_number(node):
            if all(argument in copies for argument in node.all_input_nodes):
                copies[node] = program.node_copy(node, copies.__getitem__)
            elif (size := str(_value(node))) in sizes:
                # The size of a computed value, or an element of all sizes.
                position, dimension = sizes[size]
                copies[node] = program.call_method("size", (copies[inputs[position]], dimension))
            else:
                raise ValueError(f"the number {node.name} is computed from tensors")
    program.output(tuple(copies[node] for node in numbers))
    return graph_module_of(graph_module, program).forward


def _input_before(graph: fx.Graph, name: str, example: Any) -> fx.Node:
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        node = graph.placeholder(name)
    node.meta["example_value"] = example
    return node


def _number_input(graph: fx.Graph, number: fx.Node, dtype: torch.dtype, users: list[fx.Node]) -> fx.Node:
    """Adds a 0-d tensor input, and replaces the number by it in these users."""
    name = f"number_{number.name}_{str(dtype).removeprefix('torch.')}"
    node = _input_before(graph, name, torch.zeros((), dtype=dtype))
    for user in users:
        replace_number(user, number, node)
    return node


def replace_number(user: fx.Node, number: fx.Node, tensor: fx.Node) -> None:
    """Lets a node read a 0-d tensor instead of a number, which doesn't change in place."""
    if user.target in _IN_PLACE and user.args[0] is number:
        user.target = _IN_PLACE[user.target]
    user.replace_input_with(number, tensor)


def _stack_numbers(graph: fx.Graph, numbers: set[fx.Node]) -> None:
    """Makes the tensors of numbers that have become inputs: copies, as each may be changed in place."""
    for node in list(graph.nodes):
        if node.target not in TENSORS_OF_NUMBERS or numbers.isdisjoint(node.all_input_nodes):
            continue
        with graph.inserting_before(node):
            data = node.args[0] if node.args else node.kwargs["data"]
            value = _stacked(graph, data, _value(node).dtype)
            copy = graph.call_method("to", (value, _value(node).device), {"copy": True})
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)


def _stacked(graph: fx.Graph, value: Any, dtype: torch.dtype) -> fx.Node:
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return graph.call_function(torch.stack, ([_stacked(graph, part, dtype) for part in value],))
    return graph.call_function(torch.full, ((), value), {"dtype": dtype})


def _key_input(graph: fx.Graph, number: fx.Node, free: set[fx.Node]) -> fx.Node:
    """Adds an input for a key, and replaces the number by it, except in nodes that compute other numbers."""
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
    """Moves the inputs to the front in this order, and removes unused inputs that are not in it."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and node not in ordered and not node.users:
            graph.erase_node(node)
    for node in reversed(ordered):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)
