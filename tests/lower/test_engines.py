"""Which operators run as ONNX Runtime's own: runs of them that are long enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from lit_ort.lower.engines import SHORTEST_RUN, onnx_nodes

aten = torch.ops.aten


class Chain:
    """A graph of operators one after the other, on float32[4, 6]."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.graph = fx.Graph()
        self.last = self.graph.placeholder("x")
        self.last.meta["val"] = torch.empty(4, 6, dtype=dtype)

    def then(self, target: Any, *args: Any, times: int = 1) -> list[fx.Node]:
        """Appends calls; returns them."""
        nodes = []
        for _ in range(times):
            value = target(self.last.meta["val"], *args)
            self.last = self.graph.call_function(target, (self.last, *args))
            self.last.meta["val"] = value
            nodes.append(self.last)
        return nodes

    @property
    def chosen(self) -> frozenset[fx.Node]:
        if not self.graph.nodes or next(reversed(self.graph.nodes)).op != "output":
            self.graph.output((self.last,))
        return onnx_nodes(self.graph)


@pytest.mark.parametrize(("length", "expected"), [(SHORTEST_RUN - 1, 0), (SHORTEST_RUN, SHORTEST_RUN), (20, 20)])
def test_a_run_is_long_enough_or_all_torchs(length: int, expected: int) -> None:
    chain = Chain()
    nodes = chain.then(aten.mul.Tensor, 2.0, times=length)
    assert chain.chosen == frozenset(nodes[:expected])


def test_the_shortest_run_has_eight() -> None:
    assert SHORTEST_RUN == 8


def test_an_operator_of_torchs_ends_a_run() -> None:
    chain = Chain()
    chain.then(aten.exp.default, times=5)
    chain.then(aten.tanh.default)
    chain.then(aten.neg.default, times=5)
    assert not chain.chosen


def test_each_run_counts_by_itself() -> None:
    chain = Chain()
    short = chain.then(aten.neg.default, times=7)
    chain.then(aten.tanh.default)
    long = chain.then(aten.neg.default, times=8)
    assert chain.chosen == frozenset(long)
    assert not chain.chosen & set(short)


def test_views_neither_end_a_run_nor_count() -> None:
    chain = Chain()
    nodes = []
    for _ in range(4):
        nodes += chain.then(aten.mul.Tensor, 2.0)
        chain.then(aten.transpose.int, 0, 1)
        chain.then(aten.unsqueeze.default, 0)
        chain.then(aten.squeeze.dim, 0)
    assert not chain.chosen
    chain = Chain()
    nodes = []
    for _ in range(SHORTEST_RUN):
        nodes += chain.then(aten.mul.Tensor, 2.0)
        chain.then(aten.reshape.default, [-1])
    assert chain.chosen == frozenset(nodes)


@pytest.mark.parametrize(
    ("dtype", "target", "args"),
    [
        (torch.bfloat16, aten.mul.Tensor, (2.0,)),
        (torch.bool, aten.mul.Tensor, (True,)),
        (torch.int64, aten.div.Tensor, (1,)),
        (torch.float32, aten.add.Tensor, (2.0, 3.0)),
        (torch.float32, aten.tanh.default, ()),
    ],
)
def test_operators_that_kernels_do_not_compute_alike(dtype: torch.dtype, target: Any, args: tuple[Any, ...]) -> None:
    chain = Chain(dtype)
    if len(args) == 2:
        for _ in range(20):
            (node,) = chain.then(target, args[0])
            node.kwargs = {"alpha": args[1]}
    else:
        chain.then(target, *args)
        if dtype != torch.int64:
            chain.then(target, *args, times=20)
    assert not chain.chosen
