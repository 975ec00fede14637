"""Runs a step of a case in eager and with the backend, and measures the errors."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.errors import LitOrtWarning
from lit_ort.runtime.report import GraphReport
from tests.compare import backend, gradients
from tests.zoo.cases import Case


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Args:
        errors: the relative errors of the loss, of every gradient and of every buffer, by name.
        graphs: the reports of its graphs.
    """

    errors: dict[str, float]
    graphs: tuple[GraphReport, ...]

    @property
    def worst(self) -> tuple[float, str]:
        return max((error, name) for name, error in self.errors.items())


def compare_steps(case: Case, steps: int = 2) -> Outcome:
    """Runs steps of a case without dropout, in eager and compiled, and compares the last one."""
    torch.manual_seed(0)
    module, batch = case.make(0.0)
    module.train()
    twin = copy.deepcopy(module)
    engine = backend()

    def step(module: Any, batch: dict[str, Any]) -> Tensor:
        return case.loss(module(**batch))

    compiled = torch.compile(step, backend=engine)
    actual = expected = torch.zeros(())
    for seed in range(steps):
        module.zero_grad()
        twin.zero_grad()
        # Some models draw masks with NumPy.
        np.random.seed(seed)
        with _settings(case):
            actual = compiled(module, batch)
        actual.backward()
        np.random.seed(seed)
        expected = step(twin, batch)
        expected.backward()
    return Outcome(_errors(module, twin, actual, expected), tuple(engine.compile_log.graphs))


def losses_with_dropout(case: Case, steps: int = 4) -> list[float]:
    """The losses of compiled steps with dropout, on one batch."""
    torch.manual_seed(0)
    module, batch = case.make(0.3)
    module.train()
    compiled = torch.compile(lambda module, batch: case.loss(module(**batch)), backend=backend())
    losses = []
    for _ in range(steps):
        module.zero_grad()
        with _settings(case):
            loss = compiled(module, batch)
        loss.backward()
        assert all(bool(gradient.isfinite().all()) for gradient in gradients(module).values())
        losses.append(loss.item())
    return losses


@contextmanager
def _settings(case: Case) -> Iterator[None]:
    with warnings.catch_warnings(), dynamo_settings("step", strict=not case.breaks):
        if case.breaks:
            warnings.filterwarnings("ignore", ".* runs in eager PyTorch", LitOrtWarning)
        yield


def _errors(module: torch.nn.Module, twin: torch.nn.Module, loss: Tensor, expected: Tensor) -> dict[str, float]:
    actual, reference = gradients(module), gradients(twin)
    assert reference
    assert actual.keys() == reference.keys(), actual.keys() ^ reference.keys()
    # A gradient that is zero up to rounding, such as that of a bias before a normalization, has no relative error.
    floor = 1e-2 * max(float(gradient.norm()) for gradient in reference.values())
    errors = {"loss": float(((loss - expected).abs() / expected.abs().clamp_min(1e-3)).detach())}
    for name, gradient in reference.items():
        errors[f"gradient of {name}"] = float((actual[name] - gradient).norm()) / max(float(gradient.norm()), floor)
    for (name, buffer), other in zip(module.named_buffers(), twin.buffers(), strict=True):
        errors[name] = float((buffer.double() - other.double()).norm() / other.double().norm().clamp_min(1e-3))
    return errors
