"""Recurrent modules, one operator a layer and direction.

In:  `lstm`, `gru`, `rnn_tanh` or `rnn_relu`
Out: oneDNN's LSTM layer (eager's own) or `lit_ort.recurrent_layer`, with `lit_ort.dropout` between layers
Saves the time of unrolling in time, which torch's decompositions do where the input needs a gradient: over a thousand
nodes for 35 steps, and a graph for every length. In regions where autocast chooses bfloat16, LSTMs compute in it as in
eager; the others in float32, since a product in bfloat16 and its two conversions at every step in time cost more than
the product in float32 does.
Needed for right numbers as well: the decompositions of torch 2.13 leave the dropout between layers out
(`torch/_decomp/decompositions.py`, `_rnn_helper` asks for `num_layers < i - 1`). Calls that no operator serves (packed
sequences, projections, other types) are separated into layers of torch's own where values are dropped.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of
from lit_ort.fusions.graph import FusionGraph
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "recurrent_layers"
# How many arguments come before the parameters: the input or packed data with batch sizes, then the states.
_BEFORE: dict[Any, int] = {
    aten.lstm.input: 2,
    aten.gru.input: 2,
    aten.rnn_tanh.input: 2,
    aten.rnn_relu.input: 2,
    aten.lstm.data: 3,
    aten.gru.data: 3,
    aten.rnn_tanh.data: 3,
    aten.rnn_relu.data: 3,
}
_MODES = {aten.gru.input: "gru", aten.rnn_tanh.input: "tanh", aten.rnn_relu.input: "relu"}
# What autocast converts; it leaves float64 alone.
_AUTOCAST_TYPES = {torch.float32, torch.bfloat16}
# What oneDNN calls an LSTM.
_LSTM = 2


def separate_recurrent_layers(graph: FusionGraph) -> PassReport:
    """Rewrites a captured graph in place."""
    fired, declined = 0, []
    for node in list(graph.graph.nodes):
        if node.target not in _BEFORE:
            continue
        call = _Call.of(node)
        obstacle = call.obstacle(graph)
        if obstacle is None or call.drops:
            _replace(graph, call, whole=obstacle is not None)
            fired += 1
        if obstacle is not None:
            declined.append(f"{node.name}: {obstacle}")
    return PassReport(NAME, fired, tuple(declined))


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of one call."""

    node: fx.Node
    target: Any
    data: tuple[Any, ...]
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
        before = _BEFORE[node.target]
        arguments = arguments_of(node)
        states = arguments[before - 1]
        parameters, *settings = arguments[before:]
        return cls(
            node,
            node.target,
            arguments[: before - 1],
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
        """Examples of its tensors: data, states, parameters."""
        return [value.meta["val"] for value in (*self.data, *self.states, *self.parameters)]

    @property
    def types(self) -> set[torch.dtype]:
        return {value.dtype for value in self.values}

    def obstacle(self, graph: FusionGraph) -> str | None:
        """Why torch's own operator stays, or None."""
        if len(self.data) > 1:
            return "its input is a packed sequence"
        is_lstm = self.target is aten.lstm.input
        values = self.values
        if any(isinstance(size, int) and size == 0 for size in values[0].shape):
            return "its input is empty"
        types = self.types
        if graph.low_precision(self.node) and types <= _AUTOCAST_TYPES:
            types = {torch.float32}
        if is_lstm and types != {torch.float32}:
            return "oneDNN computes LSTMs of float32 only"
        if len(types) > 1:
            return "its arguments have several types"
        if is_lstm and values[1].shape[-1] != values[2].shape[-1]:
            return "it has a projection"
        return None

    @property
    def autocast_type(self) -> torch.dtype:
        """Of what eager's cells give under autocast: a GRU adds to its state, a plain cell's result is a product's."""
        if self.target is aten.gru.input:
            return torch.promote_types(self.states[0].meta["val"].dtype, torch.bfloat16)
        return torch.bfloat16

    def in_float32(self, graph: FusionGraph) -> _Call:
        """The same call with every argument in float32."""

        def each(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(graph.call(aten.to.dtype, value, torch.float32) for value in values)

        return dataclasses.replace(
            self, data=each(self.data), states=each(self.states), parameters=each(self.parameters)
        )

    def parameters_of(self, position: int) -> tuple[Any, ...]:
        """The parameters of a layer, those of the reverse direction behind the others."""
        each = len(self.parameters) // self.layers
        return self.parameters[position * each : (position + 1) * each]


def _replace(graph: FusionGraph, call: _Call, whole: bool) -> None:
    """Puts one call a layer in a call's place: torch's own where `whole`, else an operator for each direction."""
    finals: list[list[fx.Node]] = []
    converted = not whole and graph.low_precision(call.node) and call.types <= _AUTOCAST_TYPES
    with graph.graph.inserting_before(call.node):
        given, call = call, call.in_float32(graph) if converted else call
        batch_first = not whole and bool(call.rest[0])
        value = _transposed(graph.graph, call.data[0]) if batch_first else call.data[0]
        for position in range(call.layers):
            if position > 0 and call.drops:
                arguments = (value, graph.seed(), float(call.probability), graph.next_stream())
                value = _element(graph.graph, torch.ops.lit_ort.dropout.default, arguments, 0)
            rows = (0, position * call.directions, (position + 1) * call.directions)
            states = [graph.graph.call_function(aten.slice.Tensor, (state, *rows)) for state in call.states]
            layer = _torch_layer if whole else _layer
            value, *final = layer(graph.graph, call, position, value, states)
            finals.append(final)
        stacked = [_joined(graph.graph, parts, 0) for parts in zip(*finals, strict=True)]
        results = [_transposed(graph.graph, value) if batch_first else value, *stacked]
    for user in list(call.node.users):
        result = results[arguments_of(user)[1]]
        if converted and call.target is not aten.lstm.input:
            with graph.graph.inserting_before(user):
                result = graph.graph.call_function(aten.to.dtype, (result, given.autocast_type))
        result.meta = dict(user.meta)
        user.replace_all_uses_with(result)
        graph.graph.erase_node(user)
    graph.graph.erase_node(call.node)


def _torch_layer(graph: fx.Graph, call: _Call, position: int, data: Any, states: list[fx.Node]) -> list[fx.Node]:
    """torch's own operator for one layer; its output and last states."""
    given: Any = states if isinstance(call.node.args[_BEFORE[call.target] - 1], (list, tuple)) else states[0]
    settings = (call.biases, 1, 0.0, call.training, call.bidirectional, *call.rest)
    arguments = (data, *call.data[1:], given, list(call.parameters_of(position)), *settings)
    made = graph.call_function(call.target, arguments)
    return [graph.call_function(operator.getitem, (made, element)) for element in range(1 + len(states))]


def _layer(graph: fx.Graph, call: _Call, position: int, data: Any, states: list[fx.Node]) -> list[fx.Node]:
    """One operator for each direction of a layer; its output and last states, [directions, batch, hidden] each."""
    parameters = call.parameters_of(position)
    each = len(parameters) // call.directions
    outputs, finals = [], []
    for direction in range(call.directions):
        own = parameters[direction * each : (direction + 1) * each]
        rows = (0, direction, direction + 1)
        begun = states
        if call.bidirectional:
            begun = [graph.call_function(aten.slice.Tensor, (state, *rows)) for state in states]
        direct = _lstm if call.target is aten.lstm.input else _gated
        output, *final = direct(graph, call, data, begun, own, bool(direction))
        outputs.append(output)
        finals.append(final)
    return [_joined(graph, outputs, -1), *(_joined(graph, parts, 0) for parts in zip(*finals, strict=True))]


def _lstm(
    graph: fx.Graph, call: _Call, data: Any, states: list[fx.Node], parameters: tuple[Any, ...], reverse: bool
) -> list[fx.Node]:
    weights = list(parameters)
    if not call.biases:
        weights += [graph.call_function(aten.zeros_like.default, (weight,)) for weight in parameters]
    hidden = int(call.states[0].meta["val"].shape[-1])
    settings = (reverse, [], _LSTM, hidden, 1, call.biases, False, False, False)
    made = graph.call_function(aten.mkldnn_rnn_layer.default, (data, *weights, *states, *settings))
    return [graph.call_function(operator.getitem, (made, element)) for element in range(3)]


def _gated(
    graph: fx.Graph, call: _Call, data: Any, states: list[fx.Node], parameters: tuple[Any, ...], reverse: bool
) -> list[fx.Node]:
    biases = parameters[2:] if call.biases else (None, None)
    arguments = (data, states[0], *parameters[:2], *biases, _MODES[call.target], reverse)
    output = _element(graph, torch.ops.lit_ort.recurrent_layer.default, arguments, 0)
    last = (0, 0, 1) if reverse else (0, -1, torch.iinfo(torch.int64).max)
    return [output, graph.call_function(aten.slice.Tensor, (output, *last))]


def _element(graph: fx.Graph, target: Any, arguments: tuple[Any, ...], element: int) -> fx.Node:
    return graph.call_function(operator.getitem, (graph.call_function(target, arguments), element))


def _transposed(graph: fx.Graph, value: Any) -> fx.Node:
    return graph.call_function(aten.transpose.int, (value, 0, 1))


def _joined(graph: fx.Graph, parts: Sequence[fx.Node], dimension: int) -> fx.Node:
    if len(parts) == 1:
        return parts[0]
    return graph.call_function(aten.cat.default, (list(parts), dimension))
