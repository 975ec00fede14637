"""Selection of the operators that ONNX Runtime computes: runs that are long enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from lit_ort.lower.engines import SHORTEST_RUN, onnx_nodes

aten = torch.ops.aten


class Chain:
    """A graph in which each operator reads the result of the previous one, on a tensor of shape [4, 6]."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.graph = fx.Graph()
        self.last = self.graph.placeholder("x")
        self.last.meta["val"] = torch.empty(4, 6, dtype=dtype)

    def append(self, target: Any, *args: Any, times: int = 1) -> list[fx.Node]:
        """Appends calls and returns them."""
        nodes = []
        for _ in range(times):
            value = target(self.last.meta["val"], *args)
            self.last = self.graph.call_function(target, (self.last, *args))
            self.last.meta["val"] = value
            nodes.append(self.last)
        return nodes

    @property
    def onnx_nodes(self) -> frozenset[fx.Node]:
        if not self.graph.nodes or next(reversed(self.graph.nodes)).op != "output":
            self.graph.output((self.last,))
        return onnx_nodes(self.graph)


@pytest.mark.parametrize(("length", "expected"), [(SHORTEST_RUN - 1, 0), (SHORTEST_RUN, SHORTEST_RUN), (20, 20)])
def test_only_long_runs_are_selected(length: int, expected: int) -> None:
    chain = Chain()
    nodes = chain.append(aten.mul.Tensor, 2.0, times=length)
    assert chain.onnx_nodes == frozenset(nodes[:expected])


def test_the_shortest_run_has_eight_operators() -> None:
    assert SHORTEST_RUN == 8


def test_a_torch_operator_ends_a_run() -> None:
    chain = Chain()
    chain.append(aten.exp.default, times=5)
    chain.append(aten.tanh.default)
    chain.append(aten.neg.default, times=5)
    assert not chain.onnx_nodes


def test_each_run_is_counted_separately() -> None:
    chain = Chain()
    short = chain.append(aten.neg.default, times=7)
    chain.append(aten.tanh.default)
    long = chain.append(aten.neg.default, times=8)
    assert chain.onnx_nodes == frozenset(long)
    assert not chain.onnx_nodes & set(short)


def test_views_do_not_end_a_run_and_are_not_counted() -> None:
    chain = Chain()
    nodes = []
    for _ in range(4):
        nodes += chain.append(aten.mul.Tensor, 2.0)
        chain.append(aten.transpose.int, 0, 1)
        chain.append(aten.unsqueeze.default, 0)
        chain.append(aten.squeeze.dim, 0)
    assert not chain.onnx_nodes
    chain = Chain()
    nodes = []
    for _ in range(SHORTEST_RUN):
        nodes += chain.append(aten.mul.Tensor, 2.0)
        chain.append(aten.reshape.default, [-1])
    assert chain.onnx_nodes == frozenset(nodes)


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
def test_unsupported_dtypes_and_operators_are_not_selected(
    dtype: torch.dtype, target: Any, args: tuple[Any, ...]
) -> None:
    chain = Chain(dtype)
    if len(args) == 2:
        for _ in range(20):
            (node,) = chain.append(target, args[0])
            node.kwargs = {"alpha": args[1]}
    else:
        chain.append(target, *args)
        if dtype != torch.int64:
            chain.append(target, *args, times=20)
    assert not chain.onnx_nodes
