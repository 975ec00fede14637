"""The captured graph as fusions use it: autocast regions, values that require grad, the run's seed, new nodes."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from lit_ort._compat.devices import CPU
from lit_ort._compat.torch import enter_autocast, exit_autocast
from lit_ort._compat.torch_fx import first_argument, inputs_of, is_alias, viewed_base
from lit_ort._compat.torch_ops import OF_SYMBOLS, written_arguments
from lit_ort.capture.capture import Captured
from lit_ort.capture.examples import Examples
from lit_ort.capture.input_sources import SEED, SOURCE
from lit_ort.capture.no_grad_views import untracked_nodes

_SEED_NAME = "lit_ort_seed"


class FusionGraph:
    """A captured graph while fusions rewrite it.

    Args:
        captured: a graph of ATen operators, with composite operators.
    """

    def __init__(self, captured: Captured) -> None:
        self.module = captured.module
        self.graph = captured.module.graph
        self._examples = captured.examples
        self._low = _low_precision_nodes(self.graph)
        self._untracked = untracked_nodes(self.graph)
        self._tracked = _tracked_nodes(self.graph, captured.examples, self._untracked)
        self._seed: fx.Node | None = None
        self._streams = 0
        self._origin: Mapping[str, Any] = {}

    @property
    def examples(self) -> Examples:
        """The examples of the graph's inputs; that of the seed, if there is one, is the last."""
        if self._seed is None:
            return self._examples
        with self._examples.mode:
            seed = torch.empty((), dtype=torch.int64)
        return dataclasses.replace(self._examples, tensors=(*self._examples.tensors, seed))

    @property
    def seeded(self) -> bool:
        """Whether an operator of this project draws random numbers, from the seed of the run."""
        return self._seed is not None

    def low_precision(self, node: fx.Node) -> bool:
        """Whether autocast computes an operator in bfloat16, as it does not for float64."""
        values = (argument.meta.get("val") for argument in node.all_input_nodes)
        return node in self._low and all(getattr(value, "dtype", None) != torch.float64 for value in values)

    def requires_grad(self, node: fx.Node) -> bool:
        """Whether a value requires grad; also true if that is unknown."""
        return node in self._tracked

    def may_join(self, nodes: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> bool:
        """Whether one operator at the last of some nodes computes what they compute, and has their gradient.

        Args:
            nodes: all in one grad mode, if so.
            inputs: the values that they read, none of which is written between the first and the last of them.
        """
        joined = set(nodes)
        if len({node in self._untracked for node in joined}) > 1:
            return False
        bases = set(map(viewed_base, (*inputs, *joined)))
        started = 0
        for node in self.graph.nodes:
            if started and any(viewed_base(written) in bases for written in written_arguments(node)):
                return False
            started += node in joined
            if started == len(joined):
                return True
        return False

    def autocast_input(self, value: fx.Node, node: fx.Node) -> fx.Node:
        """Casts an input of a node to bfloat16 if autocast does so for matmuls at this node."""
        if not self.low_precision(node):
            return value
        with self.graph.inserting_before(node):
            low = self.graph.call_function(torch.ops.aten.to.dtype, (value, torch.bfloat16))
        low.meta = {**value.meta}
        return low

    def seed(self) -> fx.Node:
        """The input with the seed of the run, which is added if necessary."""
        if self._seed is None:
            following = next(node for node in self.graph.nodes if node.op != "placeholder")
            with self.graph.inserting_before(following):
                self._seed = self.graph.placeholder(_SEED_NAME)
            self._seed.meta[SOURCE] = SEED
        return self._seed

    def next_stream(self) -> int:
        """The number of a random stream that no other operator of the graph uses."""
        self._streams += 1
        return self._streams - 1

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Adds a call at the graph's insertion point, with an example of its value."""
        node = self.graph.call_function(target, args)
        node.meta = {**self._origin}
        values = fx.map_arg(args, lambda argument: argument.meta["val"])
        with self._examples.mode, torch.no_grad():
            node.meta["val"] = OF_SYMBOLS.get(target, target)(*values)
        if not self._tracked.isdisjoint(node.all_input_nodes):
            self._tracked.add(node)
        return node

    @contextmanager
    def instead_of(self, node: fx.Node) -> Iterator[None]:
        """Adds calls before a node that they replace, with what is known of its place in the model."""
        self._origin = node.meta
        with self.graph.inserting_before(node):
            yield
        self._origin = {}

    def size(self, node: fx.Node, dimension: int) -> fx.Node:
        """Adds a node for the symbolic size of a value's dimension."""
        return self.call(torch.ops.aten.sym_size.int, node, dimension)

    def replace(self, node: fx.Node, target: Any, args: tuple[Any, ...], element: int | None = None) -> fx.Node:
        """Replaces a node by a call.

        Args:
            node: the node.
            target, args: the call.
            element: the index of the result that replaces the node; None if the call has a single result.
        """
        with self.graph.inserting_before(node):
            call = self.graph.call_function(target, args)
            call.meta = {**node.meta}
            result = call
            if element is not None:
                # The results of the call are a tuple; only the element has the example of the node.
                call.meta["val"] = None
                result = self.graph.call_function(operator.getitem, (call, element))
                result.meta = {**node.meta}
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)
        return result


def _low_precision_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes in autocast regions of bfloat16, inside the graph or around it."""
    low = torch.is_autocast_enabled(CPU.type) and torch.get_autocast_dtype(CPU.type) == torch.bfloat16
    nodes: set[fx.Node] = set()
    low_outside: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.target is enter_autocast:
            low_outside[node] = low
            device, dtype, enabled, _ = node.args
            if device == CPU.type:
                low = bool(enabled) and (torch.get_autocast_dtype(device) if dtype is None else dtype) == torch.bfloat16
        elif node.target is exit_autocast:
            low = low_outside[node.args[0]]
        elif low:
            nodes.add(node)
    return nodes


def _tracked_nodes(graph: fx.Graph, examples: Examples, untracked: Container[fx.Node]) -> set[fx.Node]:
    """The nodes that can require grad: those computed, outside of no_grad, from values that require grad."""
    pairs = zip(inputs_of(graph), examples.tensors, strict=True)
    tracked = {node for node, example in pairs if example.requires_grad}
    bases: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        is_detached = node.target is torch.ops.aten.detach.default
        is_view = is_alias(node) and not is_detached
        bases[node] = bases[first_argument(node)] if is_view else node
        is_untracked = node in untracked or is_detached
        if not is_untracked and any(argument in tracked for argument in node.all_input_nodes):
            tracked.add(node)
            # A tensor that is changed in place requires grad from then on, as do all views of its base.
            for written in written_arguments(node):
                tracked.update(other for other, base in bases.items() if base is bases[written])
    return tracked
