"""Separates recurrent modules into one operator for each layer and direction.

In:  `lstm`, `gru`, `rnn_tanh` or `rnn_relu`
Out: `lit_ort.recurrent_layer`, with `lit_ort.dropout` between layers
Saves the unrolling of time steps, which torch's decompositions do if the input requires grad: over a thousand nodes for
35 steps, and a separate graph for every length.

It is also required for correct results: the decompositions of torch 2.13 omit the dropout between layers
(`torch/_decomp/decompositions.py`, `_rnn_helper` has the condition `num_layers < i - 1`). Calls that no operator
supports (packed sequences, projections, other dtypes) are separated into single layers of torch if they apply dropout.

In autocast regions of bfloat16, recurrent layers compute in float32, since a bfloat16 matmul and its two conversions
at every time step take longer than the float32 matmul.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of
from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.kernels.kernel_arguments import DTYPES
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "recurrent_layers"
# Calls with packed data and its batch sizes in place of the input.
_PACKED = frozenset({aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data})
_MODES = {
    aten.lstm.input: "lstm",
    aten.gru.input: "gru",
    aten.rnn_tanh.input: "tanh",
    aten.rnn_relu.input: "relu",
    aten.lstm.data: "lstm",
    aten.gru.data: "gru",
    aten.rnn_tanh.data: "tanh",
    aten.rnn_relu.data: "relu",
}
# The dtypes that autocast converts; it does not convert float64.
_AUTOCAST_TYPES = {torch.float32, torch.bfloat16}


def separate_recurrent_layers(graph: FusionGraph) -> PassReport:
    """Separates recurrent modules in a captured graph, in place."""
    fired, declined = 0, []
    for node in list(graph.graph.nodes):
        if node.target not in _MODES:
            continue
        call = _Call.of(node)
        obstacle = call.obstacle(graph)
        if obstacle is None or call.drops:
            _replace(graph, call, by_torch=obstacle is not None)
            fired += 1
        if obstacle is not None:
            declined.append(f"{node.name}: {obstacle}")
    return PassReport(NAME, fired, tuple(declined))


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of one call of a recurrent module."""

    node: fx.Node
    target: Any
    data: Any
    batch_sizes: Any
    states: tuple[fx.Node, ...]
    parameters: tuple[Any, ...]
    biases: bool
    layers: int
    probability: float
    training: bool
    bidirectional: bool
    rest: tuple[Any, ...]

    @classmethod
    def of(cls, node: fx.Node) -> _Call:
        data, *arguments = arguments_of(node)
        batch_sizes = arguments.pop(0) if node.target in _PACKED else None
        states, parameters, *settings = arguments
        return cls(
            node,
            node.target,
            data,
            batch_sizes,
            tuple(states) if isinstance(states, (list, tuple)) else (states,),
            tuple(parameters),
            *settings[:5],
            rest=tuple(settings[5:]),
        )

    @property
    def drops(self) -> bool:
        return self.training and self.probability > 0 and self.layers > 1

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def values(self) -> list[torch.Tensor]:
        """The examples of its tensors: data, states, parameters."""
        return [value.meta["val"] for value in (self.data, *self.states, *self.parameters)]

    @property
    def types(self) -> set[torch.dtype]:
        return {value.dtype for value in self.values}

    def obstacle(self, graph: FusionGraph) -> str | None:
        """Why torch's operator is kept, or None."""
        is_packed, is_lstm, values = self.batch_sizes is not None, len(self.states) > 1, self.values
        if any(isinstance(size, int) and size == 0 for size in values[0].shape):
            return "its input is empty"
        types = self.types
        if graph.low_precision(self.node) and types <= _AUTOCAST_TYPES:
            types = {torch.float32}
        # Torch's operators for packed sequences can't be traced for any lengths.
        if is_lstm and not is_packed and not types <= DTYPES.keys():
            return f"its dtype is {_names(types)}, in which torch's LSTM is faster"
        if len(types) > 1:
            return f"its arguments have different dtypes: {_names(types)}"
        if is_lstm and values[1].shape[-1] != values[2].shape[-1]:
            return "it has a projection (proj_size)"
        return None

    @property
    def autocast_type(self) -> torch.dtype:
        """The dtype of eager's results under autocast.

        A GRU adds to its state, so the dtype of the state matters; the result of a plain cell has that of a matmul.
        """
        if _MODES[self.target] == "gru":
            return torch.promote_types(self.states[0].meta["val"].dtype, torch.bfloat16)
        return torch.bfloat16

    def in_float32(self, graph: FusionGraph) -> _Call:
        """The same call with every tensor cast to float32."""

        def cast(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(graph.call(aten.to.dtype, value, torch.float32) for value in values)

        return dataclasses.replace(
            self, data=cast((self.data,))[0], states=cast(self.states), parameters=cast(self.parameters)
        )

    def parameters_of(self, position: int) -> tuple[Any, ...]:
        """The parameters of a layer; those of the reverse direction are the last."""
        count = len(self.parameters) // self.layers
        return self.parameters[position * count : (position + 1) * count]


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _replace(graph: FusionGraph, call: _Call, by_torch: bool) -> None:
    """Replaces a call by one call for each layer: torch's operator if `by_torch`, or an operator for each direction."""
    finals: list[list[fx.Node]] = []
    converted = not by_torch and graph.low_precision(call.node) and call.types <= _AUTOCAST_TYPES
    with graph.graph.inserting_before(call.node):
        original, call = call, call.in_float32(graph) if converted else call
        steps = _packed_steps(graph.graph, call) if call.batch_sizes is not None and not by_torch else []
        batch_first = not by_torch and bool(call.rest and call.rest[0])
        value = _transposed(graph.graph, call.data) if batch_first else call.data
        for position in range(call.layers):
            if position > 0 and call.drops:
                arguments = (value, graph.seed(), float(call.probability), graph.next_stream())
                value = _element(graph.graph, torch.ops.lit_ort.dropout.default, arguments, 0)
            rows = (0, position * call.directions, (position + 1) * call.directions)
            states = [graph.graph.call_function(aten.slice.Tensor, (state, *rows)) for state in call.states]
            if by_torch:
                value, *final = _torch_layer(graph.graph, call, position, value, states)
            else:
                value, *final = _layer(graph.graph, call, position, value, states, steps)
            finals.append(final)
        last_states = [_concatenated(graph.graph, parts, 0) for parts in zip(*finals, strict=True)]
        results = [_transposed(graph.graph, value) if batch_first else value, *last_states]
    for user in list(call.node.users):
        result = results[arguments_of(user)[1]]
        if converted and len(call.states) == 1:
            with graph.graph.inserting_before(user):
                result = graph.graph.call_function(aten.to.dtype, (result, original.autocast_type))
        result.meta = dict(user.meta)
        user.replace_all_uses_with(result)
        graph.graph.erase_node(user)
    graph.graph.erase_node(call.node)


def _torch_layer(graph: fx.Graph, call: _Call, position: int, data: Any, states: list[fx.Node]) -> list[fx.Node]:
    """Adds torch's operator for one layer. Returns its output and last states."""
    has_list = isinstance(call.node.args[1 if call.batch_sizes is None else 2], (list, tuple))
    state_argument: Any = states if has_list else states[0]
    settings = (call.biases, 1, 0.0, call.training, call.bidirectional, *call.rest)
    sizes = () if call.batch_sizes is None else (call.batch_sizes,)
    arguments = (data, *sizes, state_argument, list(call.parameters_of(position)), *settings)
    layer = graph.call_function(call.target, arguments)
    return [graph.call_function(operator.getitem, (layer, element)) for element in range(1 + len(states))]


def _packed_steps(graph: fx.Graph, call: _Call) -> list[tuple[fx.Node, fx.Node]]:
    """Adds what the layers of a packed sequence read, for each direction."""
    rows, batch = (graph.call_function(aten.sym_size.int, one) for one in ((call.data, 0), (call.states[0], 1)))
    found = list[tuple[fx.Node, fx.Node]]()
    for direction in range(call.directions):
        arguments = (call.batch_sizes, rows, batch, bool(direction))
        steps = graph.call_function(torch.ops.lit_ort.packed_steps.default, arguments)
        tables, places = (graph.call_function(operator.getitem, (steps, element)) for element in range(2))
        found.append((tables, places))
    return found


def _layer(
    graph: fx.Graph,
    call: _Call,
    position: int,
    data: Any,
    states: list[fx.Node],
    steps: Sequence[tuple[fx.Node, fx.Node]],
) -> list[fx.Node]:
    """Adds an operator for each direction of a layer.

    Args:
        steps: of a packed sequence, what the operators of each direction read.

    Returns:
        The output and the last states; each state has the shape [directions, batch, hidden].
    """
    parameters = call.parameters_of(position)
    count = len(parameters) // call.directions
    outputs, finals = [], []
    for direction in range(call.directions):
        weights = parameters[direction * count : (direction + 1) * count]
        rows = (0, direction, direction + 1)
        initial = states
        if call.bidirectional:
            initial = [graph.call_function(aten.slice.Tensor, (state, *rows)) for state in states]
        of_steps = steps[direction] if steps else ()
        output, *final = _direction(graph, call, data, initial, weights, bool(direction), of_steps)
        outputs.append(output)
        finals.append(final)
    last_states = (_concatenated(graph, parts, 0) for parts in zip(*finals, strict=True))
    return [_concatenated(graph, outputs, -1), *last_states]


def _direction(
    graph: fx.Graph,
    call: _Call,
    data: Any,
    states: list[fx.Node],
    parameters: tuple[Any, ...],
    reverse: bool,
    steps: tuple[fx.Node, ...],
) -> list[fx.Node]:
    biases = parameters[2:] if call.biases else (None, None)
    cell = states[1] if len(states) > 1 else None
    arguments = (data, states[0], cell, *parameters[:2], *biases, _MODES[call.target], reverse, *steps)
    layer = graph.call_function(torch.ops.lit_ort.recurrent_layer.default, arguments)
    return [graph.call_function(operator.getitem, (layer, element)) for element in range(1 + len(states))]


def _element(graph: fx.Graph, target: Any, arguments: tuple[Any, ...], element: int) -> fx.Node:
    return graph.call_function(operator.getitem, (graph.call_function(target, arguments), element))


def _transposed(graph: fx.Graph, value: Any) -> fx.Node:
    return graph.call_function(aten.transpose.int, (value, 0, 1))


def _concatenated(graph: fx.Graph, parts: Sequence[fx.Node], dimension: int) -> fx.Node:
    if len(parts) == 1:
        return parts[0]
    return graph.call_function(aten.cat.default, (list(parts), dimension))
