"""The fusion of GELU's formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation

from tests.compare import assert_same_step, backend
from tests.passes.reports import report_of

NAME, TARGET = "gelu", "aten.gelu.default"
ROOT = math.sqrt(2 / math.pi)
Formula = Callable[[Tensor], Tensor]


def transformers_gelu(x: Tensor) -> Tensor:
    return NewGELUActivation()(x)


def tanh_gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh((x + torch.pow(x, 3) * 0.044715) * ROOT)) * 0.5


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def scaled_erf_gelu(x: Tensor) -> Tensor:
    return 0.5 * ((torch.erf(x * (1 / math.sqrt(2))) + 1) * x)


FORMULAS = [transformers_gelu, tanh_gelu, erf_gelu, scaled_erf_gelu]


def step_of(formula: Formula) -> Callable[[Any, Tensor], Tensor]:
    return lambda module, x: formula(module(x)).mean()


@pytest.mark.parametrize("formula", FORMULAS)
def test_fires(formula: Formula) -> None:
    engine = backend(disable_passes=("regions",))
    torch.compile(step_of(formula), backend=engine)(nn.Linear(6, 8), torch.randn(4, 6)).backward()
    assert report_of(engine, NAME).fired == 1
    targets = engine.compile_log.graphs[0].torch_operators
    assert targets[TARGET] == targets["aten.gelu_backward.default"] == 1
    assert not targets.keys() & {"aten.tanh.default", "aten.erf.default", "aten.pow.Tensor_Scalar"}


def other_cubic(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.0447 * x**3)))


def other_root(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3)))


def other_power(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**2)))


def other_divisor(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 1.5))


def other_cube(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * (x * 2) ** 3)))


def other_half(x: Tensor) -> Tensor:
    return 0.6 * x * (1 + torch.erf(x / math.sqrt(2)))


def other_one(x: Tensor) -> Tensor:
    return 0.5 * x * (2 + torch.erf(x / math.sqrt(2)))


def other_factor(x: Tensor) -> Tensor:
    return 0.5 * x.exp() * (1 + torch.erf(x / math.sqrt(2)))


def used_elsewhere(x: Tensor) -> Tensor:
    inner = torch.erf(x / math.sqrt(2))
    return 0.5 * x * (1 + inner) + inner


def weighted_one(x: Tensor) -> Tensor:
    inner = torch.tanh(ROOT * (x + 0.044715 * x**3))
    return 0.5 * x * torch.add(torch.ones(()), inner, alpha=2)


@pytest.mark.parametrize("formula", [other_cubic, other_root, other_power, other_divisor, other_cube])
def test_must_not_fire_for_another_argument(formula: Formula) -> None:
    engine = assert_same_step(nn.Linear(6, 8), step_of(formula), torch.randn(4, 6))
    report = report_of(engine, NAME)
    assert (report.fired, report.declined) == (0, ())
    assert TARGET not in engine.compile_log.graphs[0].torch_operators


@pytest.mark.parametrize("formula", [other_half, other_one, other_factor, used_elsewhere, weighted_one])
def test_must_not_fire_for_another_product(formula: Formula) -> None:
    engine = assert_same_step(nn.Linear(6, 8), step_of(formula), torch.randn(4, 6))
    report = report_of(engine, NAME)
    assert report.fired == 0
    (reason,) = report.declined
    assert "it is not used as in 0.5 * x * (1 + aten." in reason
    assert TARGET not in engine.compile_log.graphs[0].torch_operators


@pytest.mark.parametrize("formula", FORMULAS)
def test_same_numbers(formula: Formula) -> None:
    engine = assert_same_step(nn.Linear(6, 80), step_of(formula), 4 * torch.randn(40, 6))
    assert report_of(engine, NAME).fired == 1


def test_same_numbers_with_other_uses_of_the_argument() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        hidden = module(x)
        return (transformers_gelu(hidden) * hidden + erf_gelu(hidden)).mean()

    engine = assert_same_step(nn.Linear(6, 80), step, torch.randn(40, 6))
    assert report_of(engine, NAME).fired == 2


def test_can_be_disabled() -> None:
    engine = backend(disable_passes=(NAME,))
    torch.compile(step_of(erf_gelu), backend=engine)(nn.Linear(6, 8), torch.randn(4, 6)).backward()
    assert TARGET not in engine.compile_log.graphs[0].torch_operators
