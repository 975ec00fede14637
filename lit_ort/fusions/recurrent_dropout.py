"""Dropout between the layers of a recurrent module.

In:  `lstm`, `gru`, `rnn_tanh` or `rnn_relu` of several layers with a dropout probability above zero, in training
Out: the same operator once a layer, with `lit_ort.dropout` between them
Needed for right numbers: torch 2.13's decompositions of these operators leave the dropout out
(`torch/_decomp/decompositions.py`, `_rnn_helper` asks for `num_layers < i - 1`).
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of
from lit_ort.fusions.graph import FusionGraph
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "recurrent_dropout"
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


def separate_recurrent_layers(graph: FusionGraph) -> PassReport:
    """Rewrites a captured graph in place."""
    fired = 0
    for node in list(graph.graph.nodes):
        if node.target in _BEFORE:
            call = _Call.of(node)
            if call.training and call.probability > 0 and call.layers > 1:
                _replace(graph, call)
                fired += 1
    return PassReport(NAME, fired)


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

    def layer(self, position: int, data: Any, states: list[fx.Node]) -> tuple[Any, ...]:
        """The arguments of one layer by itself."""
        each = len(self.parameters) // self.layers
        own = list(self.parameters[position * each : (position + 1) * each])
        given: Any = states if isinstance(self.node.args[_BEFORE[self.target] - 1], (list, tuple)) else states[0]
        settings = (self.biases, 1, 0.0, self.training, self.bidirectional, *self.rest)
        return (data, *self.data[1:], given, own, *settings)


def _replace(graph: FusionGraph, call: _Call) -> None:
    directions = 2 if call.bidirectional else 1
    value, finals = call.data[0], []
    with graph.graph.inserting_before(call.node):
        for position in range(call.layers):
            if position > 0:
                arguments = (value, graph.seed(), float(call.probability), graph.next_stream())
                dropped = graph.graph.call_function(torch.ops.lit_ort.dropout.default, arguments)
                value = graph.graph.call_function(operator.getitem, (dropped, 0))
            rows = (0, position * directions, (position + 1) * directions)
            states = [graph.graph.call_function(aten.slice.Tensor, (state, *rows)) for state in call.states]
            made = graph.graph.call_function(call.target, call.layer(position, value, states))
            value = graph.graph.call_function(operator.getitem, (made, 0))
            finals.append([graph.graph.call_function(operator.getitem, (made, 1 + k)) for k in range(len(states))])
        stacked = [graph.graph.call_function(aten.cat.default, (list(parts),)) for parts in zip(*finals, strict=True)]
    results = [value, *stacked]
    for user in list(call.node.users):
        result = results[arguments_of(user)[1]]
        result.meta = dict(user.meta)
        user.replace_all_uses_with(result)
        graph.graph.erase_node(user)
    graph.graph.erase_node(call.node)
