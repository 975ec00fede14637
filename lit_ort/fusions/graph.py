"""What a fusion may ask of a captured graph: precisions of its regions, the run's seed, new nodes."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from lit_ort._compat.devices import CPU
from lit_ort._compat.torch import enter_autocast, exit_autocast, set_grad_enabled
from lit_ort._compat.torch_fx import first_argument, inputs_of, is_alias
from lit_ort._compat.torch_ops import written_arguments
from lit_ort.capture.capture import Captured
from lit_ort.capture.examples import Examples

SEED = "lit_ort_seed"


class FusionGraph:
    """A captured graph while fusions rewrite it.

    Args:
        captured: of ATen operators, composite ones whole.
    """

    def __init__(self, captured: Captured) -> None:
        self.module = captured.module
        self.graph = captured.module.graph
        self._examples = captured.examples
        self._low = _low_precision_nodes(self.graph)
        self._tracked = _tracked_nodes(self.graph, captured.examples)
        self._seed: fx.Node | None = None
        self._streams = 0

    @property
    def examples(self) -> Examples:
        """Of the graph's inputs, the seed's at the end where there is one."""
        if self._seed is None:
            return self._examples
        with self._examples.mode:
            seed = torch.empty((), dtype=torch.int64)
        return dataclasses.replace(self._examples, tensors=(*self._examples.tensors, seed))

    @property
    def draws(self) -> bool:
        """Whether an operator of the project's own draws random numbers."""
        return self._seed is not None

    def low_precision(self, node: fx.Node) -> bool:
        """Whether a node lies in a region where autocast computes in bfloat16."""
        return node in self._low

    def needs_gradient(self, node: fx.Node) -> bool:
        """Whether autograd may follow a value; true where that is not known."""
        return node in self._tracked

    def in_products(self, value: fx.Node, node: fx.Node) -> fx.Node:
        """A value in the type that a node's products are computed in."""
        if not self.low_precision(node):
            return value
        with self.graph.inserting_before(node):
            low = self.graph.call_function(torch.ops.aten.to.dtype, (value, torch.bfloat16))
        low.meta = {**value.meta}
        return low

    def seed(self) -> fx.Node:
        """The input with the seed of the run."""
        if self._seed is None:
            last = inputs_of(self.graph)[-1]
            with self.graph.inserting_after(last):
                self._seed = self.graph.placeholder(SEED)
        return self._seed

    def next_stream(self) -> int:
        """A random stream that nothing else in the graph draws from."""
        self._streams += 1
        return self._streams - 1

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Adds a call where the graph inserts, with an example of its value."""
        made = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda argument: argument.meta["val"])
        with self._examples.mode, torch.no_grad():
            made.meta["val"] = target(*values)
        return made

    def size(self, node: fx.Node, dimension: int) -> fx.Node:
        """Adds the size of a value's dimension, which the graph leaves symbolic."""
        return self.call(torch.ops.aten.sym_size.int, node, dimension)

    def replace(self, node: fx.Node, target: Any, args: tuple[Any, ...], element: int | None = None) -> fx.Node:
        """Puts a call in a node's place.

        Args:
            element: which of several results takes the node's place.
        """
        with self.graph.inserting_before(node):
            made = self.graph.call_function(target, args)
            made.meta = {**node.meta}
            result = made
            if element is not None:
                result = self.graph.call_function(operator.getitem, (made, element))
                result.meta = {**node.meta}
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)
        return result


def _low_precision_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that autocast computes in bfloat16, around the graph and in its own regions."""
    low = torch.is_autocast_enabled(CPU.type) and torch.get_autocast_dtype(CPU.type) == torch.bfloat16
    found: set[fx.Node] = set()
    outside: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.target is enter_autocast:
            outside[node] = low
            device, dtype, enabled, _ = node.args
            if device == CPU.type:
                low = bool(enabled) and (torch.get_autocast_dtype(device) if dtype is None else dtype) == torch.bfloat16
        elif node.target is exit_autocast:
            low = outside[node.args[0]]
        elif low:
            found.add(node)
    return found


def _tracked_nodes(graph: fx.Graph, examples: Examples) -> set[fx.Node]:
    """The nodes that a gradient may reach: those computed, outside of no_grad, from what needs one."""
    pairs = zip(inputs_of(graph), examples.tensors, strict=True)
    tracked = {node for node, example in pairs if example.requires_grad}
    homes: dict[fx.Node, fx.Node] = {}
    enabled = True
    for node in graph.nodes:
        is_detached = node.target is torch.ops.aten.detach.default
        is_view = is_alias(node) and not is_detached
        homes[node] = homes[first_argument(node)] if is_view else node
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif enabled and not is_detached and any(argument in tracked for argument in node.all_input_nodes):
            tracked.add(node)
            # What is written in place is tracked from then on, and so are all views of it.
            for written in written_arguments(node):
                tracked.update(other for other, home in homes.items() if home is homes[written])
    return tracked
