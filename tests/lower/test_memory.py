"""The planned memory of a phase, for small graphs whose bytes can be counted manually."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lit_ort.lower.planned_memory import peak_bytes
from lit_ort.ops import OPERATORS
from lit_ort.ops.hand_over import hand_over
from lit_ort.passes.owners import memory_owner

aten = torch.ops.aten
# The bytes of the values below, float32[10, 10].
SIZE = 400


class Graph:
    """A graph whose nodes have examples, on the meta device."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty(*(shape or (10, 10)), dtype=dtype, device="meta")
        return node

    def call(self, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, named_values = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        node.meta["val"] = target(*values, **named_values) if value is None else value
        return node

    def peak(self, *outputs: fx.Node) -> int:
        self.graph.output(outputs)
        return peak_bytes(self.graph)


def test_inputs_are_not_counted() -> None:
    g = Graph()
    assert g.peak(g.input()) == 0


def test_a_chain_needs_two_values_at_a_time() -> None:
    g = Graph()
    value = g.input()
    for _ in range(5):
        value = g.call(aten.exp.default, value)
    assert g.peak(value) == 2 * SIZE


def test_a_value_lives_until_its_last_use() -> None:
    g = Graph()
    first = g.call(aten.exp.default, g.input())
    last = g.call(aten.neg.default, g.call(aten.exp.default, g.call(aten.exp.default, first)))
    assert g.peak(g.call(aten.add.Tensor, last, first)) == 3 * SIZE


def test_outputs_are_never_freed() -> None:
    g = Graph()
    x = g.input()
    results = [g.call(aten.exp.default, x) for _ in range(4)]
    small = g.call(aten.sum.default, x)
    assert g.peak(*results, small) == 4 * SIZE + 4


def test_views_need_no_memory_and_keep_their_base() -> None:
    g = Graph()
    first = g.call(aten.exp.default, g.input())
    view = g.call(aten.permute.default, g.call(aten.unsqueeze.default, first, 0), [2, 1, 0])
    assert memory_owner(view) is first
    second = g.call(aten.exp.default, g.call(aten.neg.default, g.input()))
    assert g.peak(g.call(aten.mul.Tensor, view, second)) == SIZE + max(2 * SIZE, SIZE + 10 * SIZE)


def test_bytes_depend_on_the_dtype() -> None:
    for dtype, size in ((torch.float64, 8), (torch.bfloat16, 2), (torch.bool, 1), (torch.int64, 8)):
        g = Graph()
        assert g.peak(g.call(aten.clone.default, g.input(dtype=dtype))) == 100 * size


def test_all_results_of_an_operator_are_counted() -> None:
    g = Graph()
    norm = g.call(aten.native_layer_norm.default, g.input(), [10], None, None, 1e-5)
    elements = [g.call(operator.getitem, norm, k) for k in range(3)]
    assert memory_owner(elements[0]) is norm
    results = SIZE + 2 * 40
    assert g.peak(g.call(aten.exp.default, elements[0])) == results + SIZE


def test_an_unused_value_is_freed() -> None:
    g = Graph()
    x = g.input()
    for _ in range(5):
        g.call(aten.exp.default, x)
    assert g.peak(g.call(aten.neg.default, x)) == SIZE


def test_an_in_place_operator_needs_no_memory() -> None:
    (target,) = (op.target for op in OPERATORS.values() if op.target.name() == "lit_ort::embedding_gradient_onto")
    position = OPERATORS[target].writes_into
    assert position is not None
    g = Graph()
    table = g.call(aten.exp.default, g.input())
    value = table.meta["val"]
    arguments: list[Any] = [g.input(4, 10), g.input(4, dtype=torch.int64)]
    arguments.insert(position, table)
    written = g.call(target, *arguments, value=value)
    assert memory_owner(written) is table
    assert g.peak(g.call(aten.neg.default, written)) == 2 * SIZE


def test_a_gradient_that_the_optimizer_consumes_is_freed() -> None:
    g = Graph()
    w = g.input()
    outputs = []
    for _ in range(3):
        gradient = g.call(aten.exp.default, w)
        outputs.append(g.call(hand_over, gradient, w, value=gradient.meta["val"]))
    assert g.peak(*outputs) == SIZE


def test_a_workspace_is_counted_while_its_operator_runs() -> None:
    target = torch.ops.lit_ort.linear_cross_entropy.default
    settings = (None, -100, True, False, [True, True, False])
    g = Graph()
    hidden, weight, labels = g.input(64, 16), g.input(5000, 16), g.input(64, dtype=torch.int64)
    loss = g.call(target, hidden, weight, None, labels, *settings)
    values = [hidden.meta["val"], weight.meta["val"], None, labels.meta["val"], *settings]
    workspace_bytes = OPERATORS[target].workspace_bytes
    assert workspace_bytes is not None
    workspace = workspace_bytes(*values)
    assert workspace > 0
    results = sum(value.numel() * value.dtype.itemsize for value in loss.meta["val"])
    assert g.peak(g.call(operator.getitem, loss, 0)) == results + workspace
