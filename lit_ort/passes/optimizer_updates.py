"""Passes each gradient to the optimizer as soon as it is computed and the graph no longer reads the parameter.

In:  a fused graph whose gradients are outputs
Out: `lit_ort.hand_over(gradient, parameter)` as the output, after the last operator that reads the parameter
Saves the memory of all gradients at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from lit_ort._compat.torch_fx import base_of, inputs_of, is_view, output_of, returned_by
from lit_ort.ops.hand_over import hand_over

NAME = "optimizer_updates"


def hand_over_gradients(module: fx.GraphModule, results: int, parameters: Sequence[fx.Node]) -> int:
    """Adds the calls of `hand_over` to a graph in place. Returns the number of gradients.

    Args:
        module: the graph.
        results: the number of outputs before the gradients.
        parameters: for each gradient, the input whose gradient it is.
    """
    graph = module.graph
    returned = returned_by(graph)
    for position, value in enumerate(returned[:results]):
        if isinstance(value, fx.Node) and base_of(value) in parameters:
            returned[position] = _copied(graph, value)
    order = {node: position for position, node in enumerate(graph.nodes)}
    for position, parameter in enumerate(parameters, start=results):
        gradient = returned[position]
        readers = [gradient, *_readers(parameter)]
        last = max((node for node in readers if node.op != "output"), key=order.__getitem__)
        with graph.inserting_after(last):
            call = graph.call_function(hand_over, (gradient, parameter))
        call.meta = dict(gradient.meta)
        order[call] = order[last]
        returned[position] = call
    output_of(graph).args = (tuple(returned),)
    return len(parameters)


def _copied(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """A copy of a value that is returned, before its memory is updated."""
    place = value if value.op == "call_function" else inputs_of(graph)[-1]
    with graph.inserting_after(place):
        copy = graph.call_function(torch.ops.aten.clone.default, (value,))
    copy.meta = {"val": value.meta["val"]}
    return copy


def _readers(value: fx.Node) -> list[fx.Node]:
    """The nodes that read the memory of a value, also through views."""
    readers: list[fx.Node] = []
    pending = list(value.users)
    while pending:
        node = pending.pop()
        if node in readers:
            continue
        readers.append(node)
        if is_view(node):
            pending.extend(node.users)
    return readers
