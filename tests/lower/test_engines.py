"""Selection of the operators that ONNX Runtime computes: runs that are long enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from lit_ort.lower.engines import onnx_nodes

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


@pytest.mark.parametrize(("length", "selected"), [(7, 0), (8, 8), (20, 20)])
def test_only_runs_of_eight_operators_are_selected(length: int, selected: int) -> None:
    chain = Chain()
    nodes = chain.append(aten.mul.Tensor, 2.0, times=length)
    assert chain.onnx_nodes == frozenset(nodes[:selected])


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
    for _ in range(8):
        nodes += chain.append(aten.mul.Tensor, 2.0)
        chain.append(aten.reshape.default, [-1])
    assert chain.onnx_nodes == frozenset(nodes)


@pytest.mark.parametrize(
    ("dtype", "target", "args", "settings", "selected"),
    [
        (torch.float32, aten.mul.Tensor, (2.0,), {}, 20),
        (torch.bfloat16, aten.mul.Tensor, (2.0,), {}, 0),
        (torch.bool, aten.mul.Tensor, (True,), {}, 0),
        (torch.float32, aten.div.Tensor, (2,), {}, 20),
        (torch.int64, aten.div.Tensor, (2,), {}, 0),
        (torch.float32, aten.add.Tensor, (2.0,), {}, 20),
        (torch.float32, aten.add.Tensor, (2.0,), {"alpha": 3.0}, 0),
        (torch.float32, aten.tanh.default, (), {}, 0),
    ],
)
def test_unsupported_dtypes_and_operators_are_not_selected(
    dtype: torch.dtype, target: Any, args: tuple[Any, ...], settings: dict[str, Any], selected: int
) -> None:
    chain = Chain(dtype)
    x = chain.last
    for _ in range(20):
        chain.last = x
        (node,) = chain.append(target, *args)
        node.kwargs = settings
    assert len(chain.onnx_nodes) == selected
