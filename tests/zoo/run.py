"""Runs one step of a case in eager and through the backend, and measures how far they are apart."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_ort.backend.steps import dynamo_settings
from lit_ort.runtime.report import GraphReport
from tests.compare import backend, gradients
from tests.zoo.cases import Case


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Args:
        errors: relative error of the loss, of every gradient and of every buffer, by name.
        graphs: reports of its graphs.
    """

    errors: dict[str, float]
    graphs: tuple[GraphReport, ...]

    @property
    def worst(self) -> tuple[float, str]:
        return max((error, name) for name, error in self.errors.items())


def compare_steps(case: Case, steps: int = 2) -> Outcome:
    """Takes steps of a case without dropout, the same ones in eager and compiled, and compares the last one."""
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
        # Some models draw masks in Python.
        np.random.seed(seed)
        with dynamo_settings("step", strict=True):
            actual = compiled(module, batch)
        actual.backward()
        np.random.seed(seed)
        expected = step(twin, batch)
        expected.backward()
    return Outcome(_errors(module, twin, actual, expected), tuple(engine.compile_log.graphs))


def dropped_losses(case: Case, steps: int = 4) -> list[float]:
    """Losses of compiled steps with dropout, on one batch."""
    torch.manual_seed(0)
    module, batch = case.make(0.3)
    module.train()
    compiled = torch.compile(lambda module, batch: case.loss(module(**batch)), backend=backend())
    losses = []
    for _ in range(steps):
        module.zero_grad()
        with dynamo_settings("step", strict=True):
            loss = compiled(module, batch)
        loss.backward()
        assert all(bool(gradient.isfinite().all()) for gradient in gradients(module).values())
        losses.append(loss.item())
    return losses


def _errors(module: torch.nn.Module, twin: torch.nn.Module, loss: Tensor, expected: Tensor) -> dict[str, float]:
    found, reference = gradients(module), gradients(twin)
    assert reference
    assert found.keys() == reference.keys(), found.keys() ^ reference.keys()
    # What is zero but for rounding, such as a bias that a normalisation takes out again, has no direction to compare.
    floor = 1e-2 * max(float(gradient.norm()) for gradient in reference.values())
    errors = {"loss": float(((loss - expected).abs() / expected.abs().clamp_min(1e-3)).detach())}
    for name, gradient in reference.items():
        errors[f"gradient of {name}"] = float((found[name] - gradient).norm()) / max(float(gradient.norm()), floor)
    for (name, buffer), other in zip(module.named_buffers(), twin.buffers(), strict=True):
        errors[name] = float((buffer.double() - other.double()).norm() / other.double().norm().clamp_min(1e-3))
    return errors
