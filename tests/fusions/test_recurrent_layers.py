"""Recurrent layers as separate operators: the results of eager, and dropout between layers in training only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.errors import CaptureError
from tests.capabilities import NEEDS_AUTOCAST_LSTMS
from tests.compare import backend, mostly

KINDS = [nn.LSTM, nn.GRU, nn.RNN]


def losses(module: nn.Module, engine: Any, count: int = 3) -> list[float]:
    step = torch.compile(lambda x: module(x)[0].square().mean(), backend=engine)
    x = torch.randn(4, 5, 6)
    with dynamo_settings("step", strict=True):
        steps = [step(x) for _ in range(count)]
    steps[-1].backward()
    return [loss.item() for loss in steps]


def fired(engine: Any) -> int:
    (graph,) = engine.compile_log.graphs
    return next(report.fired for report in graph.passes if report.name == "recurrent_layers")


@pytest.mark.parametrize("kind", mostly(pytest.mark.sweep, KINDS, 2))
@pytest.mark.parametrize("bidirectional", [False, True])
def test_dropout_between_layers(kind: Any, bidirectional: bool) -> None:
    engine = backend(verify_first_step=True)
    values = losses(kind(6, 8, num_layers=3, dropout=0.5, bidirectional=bidirectional), engine)
    assert len(set(values)) == 3
    assert fired(engine) == 1


@pytest.mark.parametrize("kind", mostly(pytest.mark.sweep, KINDS, 2))
@pytest.mark.parametrize(("layers", "probability", "training"), [(1, 0.0, True), (2, 0.0, True), (2, 0.5, False)])
def test_no_other_dropout(kind: Any, layers: int, probability: float, training: bool) -> None:
    engine, module = backend(), kind(6, 8, num_layers=layers, dropout=probability).train(training)
    values = losses(module, engine)
    assert len(set(values)) == 1
    assert fired(engine) == 1


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("batch_first", mostly(pytest.mark.sweep, [True, False], 2))
@pytest.mark.parametrize("bias", mostly(pytest.mark.sweep, [True, False], 2))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_same_results_and_gradients_as_eager(kind: Any, bidirectional: bool, bias: bool, batch_first: bool) -> None:
    module = kind(6, 8, num_layers=2, bias=bias, bidirectional=bidirectional, batch_first=batch_first)
    twin, engine = copy.deepcopy(module), backend()
    directions = 2 if bidirectional else 1
    x = torch.randn(4, 5, 6)
    shape = (2 * directions, 4 if batch_first else 5, 8)
    states = (torch.randn(shape), torch.randn(shape)) if kind is nn.LSTM else torch.randn(shape)

    def step(module: nn.Module, x: Tensor) -> Tensor:
        output, last = module(x, states)
        last_states = last if isinstance(last, tuple) else (last,)
        return (output.cumsum(1) ** 2).mean() + sum((state.cumsum(0) ** 3).mean() for state in last_states)

    pairs = []
    for model, call in ((module, torch.compile(step, backend=engine)), (twin, step)):
        data = x.clone().requires_grad_()
        with dynamo_settings("step", strict=True):
            loss = call(model, data)
        loss.backward()
        pairs.append([loss, data.grad, *(parameter.grad for parameter in model.parameters())])
    for actual, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(actual, expected)
    assert fired(engine) == 1


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.LSTM(6, 8, proj_size=3), "it has a projection"),
        (nn.LSTM(6, 8, dtype=torch.bfloat16), "its dtype is bfloat16, in which torch's LSTM is faster"),
    ],
)
def test_unsupported_layers_keep_torchs_operator(module: nn.Module, reason: str) -> None:
    engine = backend(verify_first_step=True)
    step = torch.compile(lambda x: module(x)[0].square().mean(), backend=engine)
    with dynamo_settings("step", strict=True):
        step(torch.randn(4, 5, 6, dtype=next(module.parameters()).dtype)).backward()
    (graph,) = engine.compile_log.graphs
    report = next(report for report in graph.passes if report.name == "recurrent_layers")
    assert report.fired == 0
    assert reason in report.declined[0]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_a_split_graph(kind: Any, bidirectional: bool) -> None:
    module, engine = kind(6, 8, bidirectional=bidirectional), backend(verify_first_step=True)
    twin, x = copy.deepcopy(module), torch.randn(4, 5, 6)
    for call in (torch.compile(module, backend=engine), twin):
        with dynamo_settings("step", strict=True):
            output, last = call(x)
        states = last if isinstance(last, tuple) else (last,)
        (output.square().mean() + sum(state.sum() for state in states)).backward()
        # Memory of its own, as in eager: a write into the state is none into the output.
        assert all(state.untyped_storage().data_ptr() != output.untyped_storage().data_ptr() for state in states)
    for actual, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)
    assert engine.compile_log.graphs[0].kind == "split"


@NEEDS_AUTOCAST_LSTMS
def test_lstms_in_bfloat16_regions_match_eager() -> None:
    module, engine = nn.LSTM(6, 8, num_layers=2), backend(verify_first_step=True)
    x = torch.randn(4, 5, 6)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)[0].float().square().mean()

    with dynamo_settings("step", strict=True):
        torch.testing.assert_close(torch.compile(step, backend=engine)(x), step(x))
    assert fired(engine) == 1


@pytest.mark.parametrize("kind", mostly(pytest.mark.sweep, KINDS, 2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@NEEDS_AUTOCAST_LSTMS
def test_errors_in_bfloat16_regions_are_not_larger_than_in_eager(kind: Any, dtype: torch.dtype) -> None:
    module, engine = kind(6, 8, num_layers=2, bidirectional=True), backend()
    x = torch.randn(4, 5, 6, dtype=dtype)

    def step(x: Tensor, enabled: bool) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output, last = module(x)
            return output, last[0] if isinstance(last, tuple) else last

    def with_gradients(results: tuple[Tensor, Tensor]) -> list[Tensor]:
        loss = results[0].float().square().mean() + results[1].float().sum()
        return [*results, *torch.autograd.grad(loss, list(module.parameters()))]

    exact, eager = with_gradients(step(x.float(), False)), with_gradients(step(x, True))
    with dynamo_settings("step", strict=True):
        actual = with_gradients(torch.compile(step, backend=engine)(x, True))
    assert fired(engine) == 1
    for value, reference, true in zip(actual, eager, exact, strict=True):
        # Dynamo expects float32 results for LSTMs and plain RNNs, and the graph returns them in float32.
        assert value.dtype == reference.dtype or (kind is not nn.GRU and value.dtype == torch.float32)
        tolerance = max((reference.float() - true).abs().max().item(), 2**-8 * true.abs().max().item())
        torch.testing.assert_close(value.float(), true, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_convert_float64(kind: Any) -> None:
    module, engine, x = kind(6, 8, dtype=torch.float64), backend(), torch.randn(4, 5, 6, dtype=torch.float64)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)[0].square().sum()

    with dynamo_settings("step", strict=True):
        torch.testing.assert_close(torch.compile(step, backend=engine)(x), step(x), rtol=1e-12, atol=0)
    assert fired(engine) == 1


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("probability", "training"), [(0.5, True), (0.0, True), (0.5, False)])
def test_graphs_with_autograd_functions_are_declined_only_with_dropout(probability: float, training: bool) -> None:
    module = nn.LSTM(6, 8, num_layers=2, dropout=probability).train(training)
    step = torch.compile(lambda x: Twice.apply(module(x)[0]).square().mean(), backend=backend())
    x = torch.randn(4, 5, 6)
    with dynamo_settings("step", strict=True):
        if probability > 0 and training:
            with pytest.raises(CaptureError, match="has dropout between its layers"):
                step(x)
        else:
            expected = (module(x)[0] * 2).square().mean()
            torch.testing.assert_close(step(x), expected)
