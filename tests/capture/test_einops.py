"""Calls of einops are in the graph: Dynamo would take a sixth of a second to trace how the pattern of each is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from einops import einsum, rearrange, reduce, repeat
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from tests.compare import assert_same_call, backend


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.patches = Rearrange("b (n p) c -> b n (p c)", p=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=2)
        weights = einsum(q, k, "b h i d, b h j d -> b h i j").softmax(-1)
        hidden = rearrange(einsum(weights, v, "b h i j, b h j d -> b h i d"), "b h n d -> b n (h d)")
        token = repeat(self.out.bias, "c -> b n c", b=len(x), n=1)
        stacked = rearrange([hidden, self.out(hidden)], "two b n c -> b n (two c)")
        return reduce(stacked, "b n c -> b n", "mean").sum() + token.square().sum()


def test_a_step_is_one_graph_for_all_sizes() -> None:
    module, engine = Attention(), backend()

    def step(module: Any, x: Tensor) -> Tensor:
        return module(x)

    compiled = torch.compile(step, backend=engine)
    for batch, length in ((2, 5), (3, 5), (4, 7)):
        assert_same_call(module, step, compiled, torch.randn(batch, length, 8))
    assert {graph.kind for graph in engine.compile_log.graphs} == {"fused"}
    assert engine.compile_log.breaks == []
    assert len(engine.compile_log.graphs) <= 3


def test_a_graph_from_the_cache(tmp_path: Path) -> None:
    for expected in ("written", "read"):
        torch.compiler.reset()
        torch.manual_seed(0)
        module, engine = Attention(), backend(cache_dir=str(tmp_path))
        step = torch.compile(lambda module, x: module(x), backend=engine)
        assert_same_call(module, lambda module, x: module(x), step, torch.randn(2, 5, 8))
        assert str(engine.compile_log.graphs[0].cache).startswith(expected)


@pytest.mark.parametrize("pattern", ["b n c -> b", "b n c -> b d"])
def test_a_wrong_pattern_raises_what_einops_raises(pattern: str) -> None:
    step = torch.compile(lambda x: rearrange(x, pattern) + 1, backend=backend())
    with pytest.raises(Exception, match="Error while processing rearrange-reduction pattern"):
        step(torch.randn(2, 3, 4))


@pytest.mark.parametrize("listed", [False, True])
def test_arrays_stay_arrays(listed: bool) -> None:
    def step(x: Tensor) -> Any:
        array = x.numpy()
        return rearrange([array, array + 1] if listed else array[None], "n a b c -> n a (b c)")

    x = torch.randn(2, 3, 4)
    actual, expected = torch.compile(step, backend=backend())(x), step(x)
    assert type(actual) is type(expected)
    np.testing.assert_allclose(actual, expected)
