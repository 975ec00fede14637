"""The fusion of the output layer and cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compare import assert_same_step, backend
from tests.passes.reports import report_of

NAME, TARGET = "linear_cross_entropy", "lit_ort.linear_cross_entropy.default"
ROWS, WORDS = 60, 6000
Step = Callable[..., Tensor]


class Layers(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, WORDS, bias=bias)
        self.weight = nn.Parameter(torch.rand(WORDS) + 0.5, requires_grad=False)


def batch() -> tuple[Tensor, Tensor]:
    labels = torch.randint(WORDS, (ROWS,))
    labels[::7] = -100
    return torch.randn(ROWS, 8), labels


def plain(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.body(x)), y)


def summed_and_weighted(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.body(x)), y, m.weight, reduction="sum", ignore_index=-100) / 10


def shifted(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """The form of causal language models."""
    logits = m.head(m.body(x.view(4, 15, 8))).float()
    labels = F.pad(y.view(4, 15), (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


def shortened(m: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(m.body(x.view(4, 15, 8)))[:, :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), y.view(4, 15)[:, 1:].reshape(-1))


def classes_as_dimension_1(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.body(x.view(4, 15, 8))).transpose(1, 2), y.view(4, 15))


FORMS = [plain, summed_and_weighted, shifted, shortened, classes_as_dimension_1]


def unreduced(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.body(x)), y, reduction="none").sum()


def smoothed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.body(x)), y, label_smoothing=0.1)


def used_elsewhere(m: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(m.body(x))
    return F.cross_entropy(logits, y) + logits.square().mean()


def scaled(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.body(x)) * 0.5, y)


def small(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.body(x), y.clamp(0, 7))


def soft(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.body(x)), torch.full((ROWS, WORDS), 1 / WORDS))


@pytest.mark.parametrize("step", FORMS)
def test_fires(step: Step) -> None:
    engine = backend()
    torch.compile(step, backend=engine)(Layers(), *batch()).backward()
    assert report_of(engine, NAME).fired == 1
    graph = engine.compile_log.graphs[0]
    assert graph.torch_operators.get(TARGET, 0) + graph.operators_after.get("LinearCrossEntropy", 0) == 1


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (unreduced, "a loss for each row"),
        (smoothed, "label_smoothing is 0.1"),
        (used_elsewhere, "also used elsewhere"),
        (scaled, "mul.Tensor is not allowed between"),
        (small, "480 elements, fewer than"),
        (soft, "labels are torch.float32"),
    ],
)
def test_must_not_fire(step: Step, reason: str) -> None:
    engine = assert_same_step(Layers(), step, *batch())
    report = report_of(engine, NAME)
    assert report.fired == 0
    assert reason in report.declined[0]
    assert TARGET not in engine.compile_log.graphs[0].torch_operators


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("step", FORMS)
def test_same_numbers(step: Step, bias: bool) -> None:
    engine = assert_same_step(Layers(bias), step, *batch())
    assert report_of(engine, NAME).fired == 1


@pytest.mark.parametrize("trained", ["body", "head", "neither"])
def test_same_numbers_with_frozen_layers(trained: str) -> None:
    module = Layers()
    module.requires_grad_(False)
    if trained == "neither":
        x, y = batch()
        engine = backend()
        torch.testing.assert_close(torch.compile(plain, backend=engine)(module, x, y), plain(module, x, y))
    else:
        getattr(module, trained).requires_grad_(True)
        engine = assert_same_step(module, plain, *batch())
    assert report_of(engine, NAME).fired == 1


def test_must_not_fire_for_float16() -> None:
    engine = backend(fallback="error")
    x, y = batch()
    module = Layers().half()
    torch.compile(plain, backend=engine)(module, x.half(), y).backward()
    assert report_of(engine, NAME).fired == 0
    assert module.head.weight.grad is not None
