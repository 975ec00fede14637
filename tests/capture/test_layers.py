"""Recomputed layers: which nodes are marked, gradients as in eager, peak memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lit_ort._compat.torch_aot import is_marked, must_recompute, region_of
from lit_ort._compat.torch_fx import module_path
from lit_ort.capture.layers import mark_layers
from tests.compare import assert_same_step, backend
from tests.joint.traced import captured

aten = torch.ops.aten
WIDTH, LAYERS = 32, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.tanh().exp().sin()
        return self.inner(x)


class AttentionLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.scaled_dot_product_attention(x, x, x).tanh())


class Layers(nn.Module):
    """Layers in a list, and a head outside of it."""

    def __init__(self, layer: type[Layer] = Layer, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x).tanh().square().mean()


def step(module: Any, x: Tensor) -> Tensor:
    return module(x)


def graph_of(module: nn.Module, x: Tensor) -> fx.Graph:
    return captured(lambda x: module(x), x).module.graph


def marked(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_marked(node)]


def test_nodes_of_modules_in_a_list_are_marked_layer_by_layer() -> None:
    graph = graph_of(Layers(), torch.randn(8, WIDTH))
    assert mark_layers(graph) == LAYERS
    assert all(must_recompute(node) for node in marked(graph))
    assert [node.target for node in marked(graph)].count(aten.tanh.default) == 3 * LAYERS
    regions = [region_of(node) for node in marked(graph)]
    assert len(set(regions)) == LAYERS
    assert all(".layers.".replace(".", "") in (module_path(node) or "") for node in marked(graph))
    head = [node for node in graph.nodes if node.op == "call_function" and not is_marked(node)]
    assert {aten.linear.default, aten.mean.default} <= {node.target for node in head}


def test_results_of_attention_are_saved() -> None:
    graph = graph_of(Layers(AttentionLayer), torch.randn(2, 8, WIDTH))
    assert mark_layers(graph) == LAYERS
    saved = [node.target for node in marked(graph) if not must_recompute(node)]
    assert saved == [aten.scaled_dot_product_attention.default] * LAYERS


def test_checkpoints_of_the_module_are_unchanged() -> None:
    graph = graph_of(Layers(checkpoints=True), torch.randn(8, WIDTH))
    before = {node: region_of(node) for node in marked(graph)}
    assert before
    mark_layers(graph)
    assert {node: region_of(node) for node in before} == before


def test_nothing_is_marked_without_a_list() -> None:
    graph = graph_of(nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH))
    assert mark_layers(graph) == 0
    assert not marked(graph)


@pytest.mark.parametrize("recompute", ["layers", 0.5])
def test_recomputation_has_the_same_gradients_and_needs_less_memory(
    recompute: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Layers(), torch.randn(256, WIDTH)
    engine = assert_same_step(module, step, x, disable_passes=("regions",))
    torch.compiler.reset()
    module.zero_grad()
    monkeypatch.setattr("tests.compare.backend", lambda **_: backend(recompute=recompute, disable_passes=("regions",)))
    recomputing_engine = assert_same_step(module, step, x, disable_passes=("regions",))
    (saving,), (recomputing,) = engine.compile_log.graphs, recomputing_engine.compile_log.graphs
    assert recomputing.torch_operators["aten.tanh.default"] > saving.torch_operators["aten.tanh.default"]
    assert recomputing.peak_bytes < saving.peak_bytes


@pytest.mark.slow
def test_a_budget_of_one_saves_everything() -> None:
    counts = []
    for recompute in (None, 1.0):
        engine = backend(recompute=recompute, disable_passes=("regions",))
        torch.compile(step, backend=engine)(Layers(), torch.randn(8, WIDTH)).backward()
        counts.append(engine.compile_log.graphs[0].torch_operators["aten.tanh.default"])
        torch.compiler.reset()
    assert counts == [3 * LAYERS + 1] * 2
