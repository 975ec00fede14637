"""The report of a graph that can't be faster than in eager has the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lit_ort.backend import slow_reason
from lit_ort.backend.slow_reason import ALL_BY_TORCH
from lit_ort.ops.matmul import Gain
from tests.compare import backend

ROWS, WIDTH = 64, 512


@pytest.fixture(autouse=True)
def gain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a CPU on which every library computes matmuls equally fast."""
    monkeypatch.setattr(slow_reason, "onednn_gain", lambda: getattr(request, "param", Gain.NONE))


def speed_of(step: Callable[[nn.Module, Tensor], Tensor], module: nn.Module, x: Tensor) -> str | None:
    engine = backend(disable_passes=("regions",))
    torch.compile(step, backend=engine)(module, x).backward()
    (graph,) = engine.compile_log.graphs
    assert (graph.speed is None) == ("\n  speed " not in str(graph))
    return graph.speed


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 30_000))


def plain(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def with_dropout(module: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(module(x), 0.1).square().mean()


def with_labels(module: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(module(x), torch.zeros(len(x), dtype=torch.int64))


def test_matmuls_without_fusions_are_as_fast_as_eagers() -> None:
    assert speed_of(plain, layers(), torch.randn(ROWS, WIDTH)) == ALL_BY_TORCH


@pytest.mark.parametrize("gain", [Gain.MUCH], indirect=True)
def test_matmuls_of_a_faster_library_are_faster() -> None:
    assert speed_of(plain, layers(), torch.randn(ROWS, WIDTH)) is None


def test_fused_operators_are_faster() -> None:
    assert speed_of(with_dropout, layers(), torch.randn(ROWS, WIDTH)) is None
    assert speed_of(with_labels, classifier(), torch.randn(4 * ROWS, WIDTH)) is None


@pytest.mark.parametrize("step", [plain, with_dropout, with_labels])
def test_a_small_graph_is_slower(step: Callable[[nn.Module, Tensor], Tensor]) -> None:
    speed = speed_of(step, layers(), torch.randn(2, WIDTH))
    assert speed is not None
    # Two matmuls in the forward and three in the backward, as the first input requires no gradient.
    matmuls = 5 * 2 * 2 * WIDTH * 4 * WIDTH
    assert f"{matmuls / 1e9:.2g} GFLOP" in speed


def test_a_graph_without_gradients_has_no_report_of_speed() -> None:
    engine = backend()
    with torch.no_grad():
        torch.compile(plain, backend=engine)(layers(), torch.randn(2, WIDTH))
    assert engine.compile_log.graphs[0].speed is None


def test_the_speed_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lit_ort")
    step = torch.compile(plain, backend=backend(dynamic="never", disable_passes=("regions",)))
    for rows in (ROWS, ROWS + 1, ROWS + 2):
        step(layers(), torch.randn(rows, WIDTH)).backward()
    hints = [record.getMessage() for record in caplog.records if "the speed of" in record.getMessage()]
    assert hints == [f"lit_ort: the speed of graph_0 is {ALL_BY_TORCH}"]


def test_matmuls_of_our_operators_are_counted() -> None:
    q, weight, seed = torch.randn(2, 3, 8, 16), torch.randn(100, 16), torch.tensor(1)
    labels = torch.zeros(10, dtype=torch.int64)
    own = torch.ops.lit_ort
    with FlopCounterMode(display=False) as counter:
        own.attention(q, q, q, None, seed, 0.1, False, 1.0, 0)
        own.attention_backward(q, q, q, q, None, seed, 0.1, False, 1.0, 0)
        arguments = (torch.randn(10, 16), weight, None, labels, None, -100, True, False, [True, True, False])
        own.linear_cross_entropy(*arguments)
    counts = {str(target): count for target, count in counter.get_flop_counts()["Global"].items()}
    matmul = 2 * 2 * 3 * 8 * 8 * 16
    assert counts["lit_ort.attention"] == 2 * matmul
    assert counts["lit_ort.attention_backward"] == 5 * matmul
    assert counts["lit_ort.linear_cross_entropy"] == 3 * 2 * 10 * 16 * 100


def test_dynamic_sizes_count_with_their_first_values() -> None:
    engine = backend(disable_passes=("regions",))
    step = torch.compile(plain, backend=engine)
    module = layers()
    for rows in (ROWS, 2 * ROWS):
        step(module, torch.randn(rows, WIDTH)).backward()
    assert [graph.speed for graph in engine.compile_log.graphs] == [ALL_BY_TORCH] * 2
