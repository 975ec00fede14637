"""Makes Dynamo trace packed sequences without a graph break: `pack_padded_sequence`, layers, `pad_packed_sequence`.

By default Dynamo calls these functions in eager, since the sizes of a packed sequence depend on values of lengths. Here
the number of rows at each step and the places of the packed rows in the padded batch are inputs of the graph, computed
before it from the lengths, as the indices of other selections are. Packing is then a selection of rows by indices, and
padding writes rows by the same ones. Lengths that depend on weights still end the graph.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import ConstantVariable, TensorVariable, UserFunctionVariable
from torch.nn.utils.rnn import PackedSequence

from lit_ort._compat.deferred_calls import is_unread
from lit_ort._compat.input_functions import InputFunction, is_unchanged
from lit_ort._compat.selections import as_input, call, computed_input, node_of, variable_of
from lit_ort._compat.torch_fx import arguments_of
from lit_ort._compat.unread_lists import UnreadList

# Of an output graph: what it knows of packed sequences.
_ATTRIBUTE = "_lit_ort_packed"
_RNNS = (nn.RNN, nn.LSTM, nn.GRU)
# In these, the first batch size is a number of rows.
_READERS = frozenset(
    function.__code__
    for function in (*(rnn.forward for rnn in _RNNS), *(rnn.get_expected_hidden_size for rnn in _RNNS))
)


def packed_places(lengths: Tensor, enforce_sorted: bool) -> Tensor:
    """The places of packed rows in the rows of a padded batch [steps, batch].

    Raises:
        RuntimeError: a length is not positive, or lengths that should be sorted are not.
    """
    if enforce_sorted:
        order = torch.arange(len(lengths))
    else:
        lengths, order = torch.sort(lengths, descending=True)
    places = torch.arange(int(lengths.max()))[:, None] * len(lengths) + order
    return torch._VF._pack_padded_sequence(places, lengths, False)[0]


def packed_batch_sizes(lengths: Tensor) -> Tensor:
    """The number of rows at each step."""
    return (torch.arange(int(lengths.max()))[:, None] < lengths).sum(1)


def packed_order(lengths: Tensor) -> Tensor:
    """The rows from the longest to the shortest."""
    return torch.argsort(lengths, descending=True)


def padded_places(batch_sizes: Tensor, order: Tensor | None) -> Tensor:
    """The same as `packed_places`, from the fields of a packed sequence."""
    rows = torch.arange(int(batch_sizes[0]))
    places = torch.arange(len(batch_sizes))[:, None] * len(rows) + (rows if order is None else order)
    return places[rows < batch_sizes[:, None]]


def padded_lengths(batch_sizes: Tensor, order: Tensor | None) -> Tensor:
    """The lengths in the order of the padded batch."""
    # Sorted lengths are to batch sizes as these are to them.
    lengths = packed_batch_sizes(batch_sizes)
    return lengths if order is None else torch.empty_like(lengths).index_copy(0, order, lengths)


def packed_rows(batch_sizes: Tensor) -> Tensor:
    """A tensor with as many elements as the padded batch has rows."""
    return torch.empty(int(batch_sizes[0]))


def pack_padded_sequence(
    input: Tensor, lengths: Tensor | list[int], batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """As torch's function; Dynamo traces this one."""
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    else:
        lengths = lengths.to(torch.int64)
    places, batch_sizes = packed_places(lengths, enforce_sorted), packed_batch_sizes(lengths)
    batch, steps = (input.size(0), input.size(1)) if batch_first else (input.size(1), input.size(0))
    if lengths.size(0) < batch and not enforce_sorted:
        # Eager selects the rows that have lengths.
        batch = lengths.size(0)
        input = input.narrow(0 if batch_first else 1, 0, batch)
    if lengths.size(0) != batch or batch_sizes.size(0) > steps:
        # Eager raises its error.
        torch._dynamo.graph_break()
    order = None if enforce_sorted else packed_order(lengths)
    inverse = None if order is None else torch.argsort(order)
    data = input.flatten(0, 1).index_select(0, _places(places, batch, steps, batch_first))
    return PackedSequence(data, batch_sizes, order, inverse)


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """As torch's function; Dynamo traces this one."""
    data, batch_sizes, order, _ = sequence
    steps = batch_sizes.size(0)
    if total_length is not None:
        if total_length < steps:
            # Eager raises its error.
            torch._dynamo.graph_break()
        steps = total_length
    batch, rest = packed_rows(batch_sizes).size(0), data.shape[1:]
    # As eager's result, which is a transposed view if the rows stay in their order.
    by_batch = batch_first and order is not None
    places = _places(padded_places(batch_sizes, order), batch, steps, by_batch)
    rows = data.new_full((batch * steps, *rest), padding_value).index_copy(0, places, data)
    padded = rows.view(batch, steps, *rest) if by_batch else rows.view(steps, batch, *rest)
    if batch_first and not by_batch:
        padded = padded.transpose(0, 1)
    return padded, padded_lengths(batch_sizes, order)


def _places(places: Tensor, batch: int, steps: int, batch_first: bool) -> Tensor:
    """Places of [steps, batch] in this order, or in that of [batch, steps]."""
    return places % batch * steps + places // batch if batch_first else places


class Packing(UserFunctionVariable):
    """`pack_padded_sequence`, to which lengths in a list are handed as a tensor.

    It is an input for a list that is one, and the tensor that the step made the list of.
    """

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        args = list(args)
        lengths = args[1] if len(args) > 1 else kwargs.get("lengths")
        tensor = _tensor_of_list(tx, lengths)
        if tensor is not None and len(args) > 1:
            args[1] = tensor
        elif tensor is not None:
            kwargs = {**kwargs, "lengths": tensor}
        return super().call_function(tx, args, kwargs)


def _tensor_of_list(tx: Any, lengths: Any) -> Any:
    """A list or tuple of integers that nothing has read so far, as a tensor; None if lengths are anything else.

    Dynamo would guard on each of its items.
    """
    if type(lengths) is UnreadList:
        return lengths.tensor
    if lengths is None or not is_unread(tx, lengths) or lengths.peek_type() not in (list, tuple):
        return None
    value = lengths.peek_value()
    if not value or any(type(item) is not int for item in value):
        return None
    install_guard(lengths.source.make_guard(GuardBuilder.TYPE_MATCH))
    found = InputFunction(_as_tensor, [lengths.source], _as_tensor(value))
    return variable_of(tx, computed_input(tx, found, "lengths_of_list", (0,)))


def _as_tensor(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int64)


@dataclasses.dataclass
class _Packed:
    """What a trace knows of its packed sequences, as nodes.

    Args:
        lengths: from batch sizes and from the order of rows to the lengths that they were computed from.
        orders: from batch sizes to the order of rows, for sequences that are inputs.
        places: from lengths, and whether they are sorted, to the places of packed rows.
    """

    lengths: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    orders: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    places: dict[tuple[fx.Node, bool], fx.Node] = dataclasses.field(default_factory=dict)


def _packed(tx: Any) -> _Packed:
    return tx.output.__dict__.setdefault(_ATTRIBUTE, _Packed())


def _input(tx: Any, node: fx.Node) -> Any:
    """What a node computes, as an input whose size can change; None if it depends on more than inputs."""
    proxy = as_input(tx, node)
    return None if proxy is None else variable_of(tx, proxy)


def _of_places(tx: Any, node: fx.Node) -> Any:
    lengths, is_sorted = arguments_of(node)
    found = _input(tx, node)
    if found is not None:
        _packed(tx).places[lengths, is_sorted] = node_of(found)
    return found


def _of_batch_sizes(tx: Any, node: fx.Node) -> Any:
    found = _input(tx, node)
    if found is not None:
        _packed(tx).lengths[node_of(found)] = arguments_of(node)[0]
    return found


def _of_order(tx: Any, node: fx.Node) -> Any:
    """In the graph, which drops it if nothing needs it."""
    found = call(tx, torch.argsort, node.args[0], -1, True)
    _packed(tx).lengths[node_of(found)] = arguments_of(node)[0]
    return found


def _of_padded_places(tx: Any, node: fx.Node) -> Any:
    lengths = _lengths(tx, *arguments_of(node))
    places = None if lengths is None else _packed(tx).places.get((lengths, node.args[1] is None))
    return _input(tx, node) if places is None else variable_of(tx, _proxy(tx, places))


def _of_padded_lengths(tx: Any, node: fx.Node) -> Any:
    """The lengths themselves, if they are known."""
    lengths = _lengths(tx, *arguments_of(node))
    return _input(tx, node) if lengths is None or not is_unchanged(lengths) else call(tx, "clone", lengths)


def _of_rows(tx: Any, node: fx.Node) -> Any:
    """A tensor of the graph that has as many elements; the size of one that is computed for it would be a constant."""
    known = _packed(tx)
    (batch_sizes,) = arguments_of(node)
    tensor = known.lengths.get(batch_sizes, known.orders.get(batch_sizes))
    return _input(tx, node) if tensor is None else call(tx, torch.empty_like, tensor)


def _lengths(tx: Any, batch_sizes: fx.Node, order: fx.Node | None) -> fx.Node | None:
    """The lengths that the fields of a packed sequence were computed from; None if the trace doesn't know them."""
    known = _packed(tx).lengths
    lengths = known.get(batch_sizes)
    fields = [batch_sizes] if order is None else [batch_sizes, order]
    return lengths if all(known.get(field) is lengths and is_unchanged(field) for field in fields) else None


def _first_batch_size(tx: Any, node: fx.Node) -> Any:
    """The batch size of a packed sequence as a size, where a recurrent module reads it; otherwise None."""
    batch_sizes, index = arguments_of(node)
    if tx.f_code not in _READERS or index != 0:
        return None
    order = tx.symbolic_locals.get("sorted_indices")
    if order is not None and type(order := order.realize()) is TensorVariable:
        _packed(tx).orders[batch_sizes] = node_of(order)
    rows = tx.output.create_proxy("call_function", packed_rows, (_proxy(tx, batch_sizes),), {})
    found = _of_rows(tx, rows.node)
    tx.output.remove_node(rows.node)
    return None if found is None else found.call_method(tx, "size", [ConstantVariable.create(0)], {})


def _layer(tx: Any, node: fx.Node) -> None:
    """Ends the graph at layers of packed sequences that have projections, which can't be traced for any lengths."""
    data, batch_sizes, states, *_ = arguments_of(node)
    if isinstance(batch_sizes, fx.Node) and isinstance(states, (list, tuple)):
        h, c = (state.meta["example_value"] for state in states)
        if h.shape[-1] != c.shape[-1]:
            unimplemented(
                gb_type="LSTM with proj_size on a packed sequence",
                context=str(data),
                explanation="An LSTM with a projection can't be traced for packed sequences of any lengths.",
                hints=["Leave out proj_size, or pass it padded sequences."],
            )


def _proxy(tx: Any, node: fx.Node) -> fx.Proxy:
    return fx.Proxy(node, tx.output.current_tracer)


# By what a node calls. Each function returns None where it has no other form of the node.
PACKED: Mapping[Any, Callable[[Any, fx.Node], Any]] = MappingProxyType(
    {
        packed_places: _of_places,
        packed_batch_sizes: _of_batch_sizes,
        packed_order: _of_order,
        padded_places: _of_padded_places,
        padded_lengths: _of_padded_lengths,
        packed_rows: _of_rows,
        operator.getitem: _first_batch_size,
        torch.lstm: _layer,
    }
)
for _function in (packed_places, packed_batch_sizes, packed_order, padded_places, padded_lengths, packed_rows):
    torch._dynamo.allow_in_graph(_function)
for _function in (packed_places, packed_batch_sizes, padded_places, padded_lengths, packed_rows, _as_tensor):
    # Dynamo would compile it where it is called before a graph.
    skip_code(_function.__code__)
