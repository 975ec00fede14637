"""Results of an FX graph that depend on none of its inputs, such as a mask that crosses a graph break.

A session can't hand them out: its optimizers turn them into constants, and a constant is no result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode


def constant_results(graph: fx.Graph, owner: torch.nn.Module) -> dict[fx.Node, torch.Tensor]:
    """Values of the returned tensors that no input and no random number reaches.

    Args:
        owner: the module whose attributes the graph reads.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    variable = _reached_by_inputs(graph)
    fixed = [node for node in output.all_input_nodes if node not in variable]
    if any(_changes_in_place(node) for node in graph.nodes if node not in variable):
        return {}
    found = {node: _value(graph, node, owner) for node in fixed}
    return {node: value for node, value in found.items() if isinstance(value, torch.Tensor)}


def _reached_by_inputs(graph: fx.Graph) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
    return reached


def _value(graph: fx.Graph, result: fx.Node, owner: torch.nn.Module) -> Any:
    """What a node computes, or None where it draws."""
    alone = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    needed = _ancestors(result)
    for node in graph.nodes:
        if node in needed:
            copies[node] = alone.node_copy(node, copies.__getitem__)
    alone.output(copies[result])
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _Watch() as watch:
        value = fx.GraphModule(owner, alone)()
    return None if watch.drew else value


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, waiting = {node}, [node]
    while waiting:
        for argument in waiting.pop().all_input_nodes:
            if argument not in found:
                found.add(argument)
                waiting.append(argument)
    return found


def _changes_in_place(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("setitem", "__setitem__") or "out" in node.kwargs


class _Watch(TorchDispatchMode):
    """Notices random numbers."""

    drew = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        self.drew |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))
