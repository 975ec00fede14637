"""What the tests of both fusions of convolutions compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.compare import assert_same_step
from tests.passes.reports import report_of

Step = Callable[[Any, Tensor], Tensor]


def assert_fires(name: str, module: nn.Module, step: Step, x: Tensor, count: int) -> None:
    """A fusion rewrites so many convolutions of a step, none stays, and loss and gradients are eager's."""
    engine = assert_same_step(module, step, x)
    assert report_of(engine, name).fired == count
    assert "aten.convolution.default" not in engine.compile_log.graphs[0].torch_operators


def assert_declines(name: str, module: nn.Module, step: Step, x: Tensor) -> None:
    """A fusion rewrites no convolution of a step."""
    assert report_of(assert_same_step(module, step, x), name).fired == 0


def declined(name: str, module: nn.Module, step: Step, x: Tensor) -> str:
    """Why a fusion leaves the only convolution of a step."""
    (reason,) = report_of(assert_same_step(module, step, x), name).declined
    return reason
