"""Recurrent layers in sessions that call no Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from lit_ort.lower import placed_values
from tests.compare import backend, relative_error
from tests.lower.test_native_phases import any_number_of_operators, assert_native

pytestmark = pytest.mark.usefixtures("uses_openmp", any_number_of_operators.__name__)

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
# Which results of a layer have a gradient.
READS: dict[str, Callable[[Tensor, tuple[Tensor, ...]], Tensor]] = {
    "all results": lambda output, last: (output**2).sum() + sum((x**3).sum() for x in last),
    "the output": lambda output, last: (output**2).sum(),
    "the last states": lambda output, last: torch.stack([(x**3).sum() for x in last]).sum(),
    "the last step": lambda output, last: (output[-1] ** 2).sum(),
}


class Step(nn.Module):
    def __init__(self, kind: str, read: str, has_states: bool, **options: Any) -> None:
        super().__init__()
        self.layers = KINDS[kind](5, 7, **options)
        self.head = nn.Linear(5, 5)
        self.read, self.has_states = READS[read], has_states

    def forward(self, x: Tensor, *states: Any) -> Tensor:
        given = states if len(states) > 1 else next(iter(states), None)
        output, last = self.layers(self.head(x), given)
        return self.read(output, last if isinstance(last, tuple) else (last,))


def mostly_swept(kinds: Collection[str], others: Collection[Any]) -> list[Any]:
    """All pairs as parameters of a test, most of them marked as a sweep; the others have every kind and every other."""
    pairs = list(itertools.product(enumerate(kinds), enumerate(others)))
    marks = [[] if k % len(others) == j % len(kinds) else [pytest.mark.sweep] for (k, _), (j, _) in pairs]
    return [pytest.param(kind, other, marks=mark) for ((_, kind), (_, other)), mark in zip(pairs, marks, strict=True)]


def states_of(step: Step, batch: int) -> list[Tensor]:
    layers = step.layers
    shape = layers.num_layers * (2 if layers.bidirectional else 1), batch, layers.hidden_size
    dtype = next(step.parameters()).dtype
    count = 0 if not step.has_states else 2 if isinstance(layers, nn.LSTM) else 1
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(count)]


def check(step: Step, *shapes: tuple[int, int], dynamic: bool | None = False, tolerance: float = 1e-5) -> None:
    """Loss and gradients as in eager, for each length and batch, in sessions without a call of Python."""
    compiled = torch.compile(step, backend=(engine := backend()), dynamic=dynamic)
    for length, batch in shapes:
        size = (batch, length) if step.layers.batch_first else (length, batch)
        x = torch.randn(*size, 5, dtype=next(step.parameters()).dtype, requires_grad=True)
        given = [x, *states_of(step, batch)]
        found = []
        for call in (step, compiled):
            loss = call(*given)
            found.append([loss.detach(), *torch.autograd.grad(loss, [*given, *step.parameters()], allow_unused=True)])
        for expected, actual in zip(*found, strict=True):
            assert (expected is None) == (actual is None)
            if expected is not None:
                assert relative_error(actual, expected) <= tolerance
    assert_native(engine)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "read"), mostly_swept(KINDS, READS))
@pytest.mark.parametrize("has_states", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_results_that_are_read(kind: str, read: str, has_states: bool) -> None:
    check(Step(kind, read, has_states), (6, 3))


OPTIONS: dict[str, dict[str, Any]] = {
    "no biases": {"bias": False},
    "both directions": {"bidirectional": True},
    "several layers": {"num_layers": 3},
    "batches first": {"batch_first": True},
    "both directions of several layers, batches first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "name"), mostly_swept(KINDS, OPTIONS))
def test_options(kind: str, name: str) -> None:
    options = OPTIONS[name]
    step = Step(kind, "all results", True, **options)
    check(step.double() if "dtype" in options else step, (4, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_change(kind: str) -> None:
    check(Step(kind, "all results", True, bidirectional=True), (4, 3), (6, 2), (1, 1), (9, 17), dynamic=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "is_long"), mostly_swept(KINDS, (True, False)))
def test_blocks_of_several_threads(kind: str, is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ort.kernels.recurrent_loop._ONE_BLOCK", 0)
    check(Step(kind, "all results", True), (40, 2) if is_long else (3, 40))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_values_in_the_memory_of_a_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_values, "_FEWEST_BYTES", 0)
    monkeypatch.setattr(placed_values, "_FEWEST_OF_ALL", 0)
    check(Step(kind, "all results", True, num_layers=2, bidirectional=True), (6, 3), (5, 2), dynamic=True)


@pytest.mark.parametrize("kind", ["lstm", "tanh"])
def test_steps_without_gradients(kind: str) -> None:
    step = Step(kind, "all results", True)
    compiled = torch.compile(step, backend=(engine := backend()))
    given = [torch.randn(4, 3, 5), *states_of(step, 3)]
    with torch.no_grad():
        assert relative_error(compiled(*given).detach(), step(*given).detach()) <= 1e-5
    assert_native(engine)


class PackedStep(nn.Module):
    """A step of sequences of different lengths, as in `pad_packed_sequence`."""

    def __init__(self, kind: str, read: str, **options: Any) -> None:
        super().__init__()
        self.layers, self.read = KINDS[kind](5, 7, batch_first=True, **options), READS[read]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, last = self.layers(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
        return self.read(padded.transpose(0, 1), last if isinstance(last, tuple) else (last,))


BOTH_WAYS = {"num_layers": 2, "bidirectional": True}
PACKED: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("all results", BOTH_WAYS, torch.float32),
    ("the last states", {}, torch.float64),
    ("all results", {}, torch.float32),
    ("the last states", BOTH_WAYS, torch.float64),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "case"), mostly_swept(KINDS, PACKED))
def test_packed_sequences(
    kind: str, case: tuple[str, dict[str, Any], torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_ort.kernels.recurrent_loop._ONE_BLOCK", 0)
    read, options, dtype = case
    step = PackedStep(kind, read, **options).to(dtype)
    compiled = torch.compile(step, backend=(engine := backend()), dynamic=True)
    for lengths in ([6, 2, 6, 1], [3, 5, 5, 2, 4, 1, 1], [9], [2, 2]):
        x = torch.randn(len(lengths), max(lengths), 5, dtype=dtype, requires_grad=True)
        found = []
        for call in (step, compiled):
            loss = call(x, torch.tensor(lengths))
            found.append([loss.detach(), *torch.autograd.grad(loss, [x, *step.parameters()])])
        assert all(relative_error(actual, expected) <= 1e-5 for expected, actual in zip(*found, strict=True))
    for graph in engine.compile_log.graphs:
        assert "RecurrentLoop" in str(graph)
        assert not any("recurrent_loop" in name for name in graph.torch_operators), graph.torch_operators


def test_the_dumped_model_says_what_a_loop_computes(tmp_path: Path) -> None:
    step = Step("gru", "the output", False, bidirectional=True)
    compiled = torch.compile(step, backend=backend(dump_dir=str(tmp_path)))
    compiled(torch.randn(4, 3, 5)).backward()
    (path,) = tmp_path.glob("*/4_forward.onnx")
    loops = [node for node in onnx.load(path).graph.node if node.op_type == "RecurrentLoop"]
    found = [{one.name: onnx.helper.get_attribute_value(one) for one in node.attribute} for node in loops]
    assert sorted(one["direction"] for one in found) == [b"forward", b"forward", b"reverse", b"reverse"]
    assert {one["mode"] for one in found} == {b"gru"}
    assert all(len(one["arguments"]) == len(node.input) for one, node in zip(found, loops, strict=True))
