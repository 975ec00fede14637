"""Hands each gradient to the optimizer as soon as it is there and its parameter's old value is read no more.

In:  a fused graph whose gradients are outputs
Out: `lit_ort.hand_over(gradient, parameter)` behind the last operator that reads the parameter, as the output
Saves holding all gradients at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from lit_ort._compat.torch_fx import is_view, output_of, returned_by
from lit_ort.ops.hand_over import hand_over

NAME = "optimizer_updates"


def hand_over_gradients(module: fx.GraphModule, results: int, parameters: Sequence[fx.Node]) -> int:
    """Rewrites a graph in place; returns how many gradients it hands over.

    Args:
        results: how many of the outputs come before the gradients.
        parameters: for each gradient, the input that it is of.
    """
    graph = module.graph
    returned = returned_by(graph)
    order = {node: position for position, node in enumerate(graph.nodes)}
    for position, parameter in enumerate(parameters, start=results):
        gradient = returned[position]
        readers = [gradient, *_readers(parameter)]
        last = max((node for node in readers if node.op != "output"), key=order.__getitem__)
        with graph.inserting_after(last):
            made = graph.call_function(hand_over, (gradient, parameter))
        made.meta = dict(gradient.meta)
        order[made] = order[last]
        returned[position] = made
    output_of(graph).args = (tuple(returned),)
    return len(parameters)


def _readers(value: fx.Node) -> list[fx.Node]:
    """The nodes that read a value's memory, through whatever view."""
    found: list[fx.Node] = []
    waiting = list(value.users)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.append(node)
        if is_view(node):
            waiting.extend(node.users)
    return found
