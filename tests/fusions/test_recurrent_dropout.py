"""Dropout between recurrent layers: drawn in training, as eager without it, refused where nothing would write it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_ort.backend.steps import dynamo_settings
from lit_ort.errors import CaptureError
from tests.compare import backend

KINDS = [nn.LSTM, nn.GRU, nn.RNN]


def losses(module: nn.Module, engine: Any, count: int = 3) -> list[float]:
    step = torch.compile(lambda x: module(x)[0].square().mean(), backend=engine)
    x = torch.randn(4, 5, 6)
    with dynamo_settings("step", fail_on_recompile_limit=True):
        found = [step(x) for _ in range(count)]
    found[-1].backward()
    return [loss.item() for loss in found]


def fired(engine: Any) -> int:
    (graph,) = engine.compile_log.graphs
    return next(report.fired for report in graph.passes if report.name == "recurrent_dropout")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_values_are_dropped_between_layers(kind: Any, bidirectional: bool) -> None:
    engine = backend(verify_first_step=True)
    found = losses(kind(6, 8, num_layers=3, dropout=0.5, bidirectional=bidirectional), engine)
    assert len(set(found)) == 3
    assert fired(engine) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "probability", "training"), [(1, 0.0, True), (2, 0.0, True), (2, 0.5, False)])
def test_nothing_is_dropped_elsewhere(kind: Any, layers: int, probability: float, training: bool) -> None:
    engine, module = backend(), kind(6, 8, num_layers=layers, dropout=probability).train(training)
    found = losses(module, engine)
    assert len(set(found)) == 1
    assert fired(engine) == 0


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("probability", "training"), [(0.5, True), (0.0, True), (0.5, False)])
def test_graphs_with_functions_of_users_are_refused_only_where_values_are_dropped(
    probability: float, training: bool
) -> None:
    module = nn.LSTM(6, 8, num_layers=2, dropout=probability).train(training)
    step = torch.compile(lambda x: Twice.apply(module(x)[0]).square().mean(), backend=backend())
    x = torch.randn(4, 5, 6)
    with dynamo_settings("step", fail_on_recompile_limit=True):
        if probability > 0 and training:
            with pytest.raises(CaptureError, match="drops values between its layers"):
                step(x)
        else:
            expected = (module(x)[0] * 2).square().mean()
            torch.testing.assert_close(step(x), expected)
