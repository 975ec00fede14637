"""Runs a function through the `ort` backend and in eager, on the same inputs, for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.nn import functional

from lit_ort.backend.backend import ORTBackend
from lit_ort.options import ORTOptions

# Of torch's, which traces more than its predecessors.
SINCE_2_15 = Version(torch.__version__) >= Version("2.15")
# Relative error in the 2-norm that float32 arithmetic in another order accounts for.
TOLERANCE = 1e-5


def backend(**options: Any) -> ORTBackend:
    """A backend of its own for one test, which raises rather than falls back."""
    return ORTBackend(ORTOptions.from_mapping({"fallback": "error", **options}))


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend(**options))


# What keeps `sparse_gradient` from sessions.
REASON = "a gradient is a sparse tensor"


def sparse_gradient(table: torch.Tensor) -> torch.Tensor:
    """A step that no session runs. table: float[3.., width]."""
    return functional.embedding(torch.tensor([0, 2, 2]), table, sparse=True).square().sum()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients by parameter name."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same_step(
    module: nn.Module,
    step: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> ORTBackend:
    """Loss and every gradient of `step(module, *inputs)` agree with eager. Returns the backend for a look inside."""
    twin = copy.deepcopy(module)
    engine = backend(**options)
    expected = step(twin, *inputs)
    expected.backward()
    actual = torch.compile(step, backend=engine)(module, *inputs)
    actual.backward()
    assert relative_error(actual.detach(), expected.detach()) <= tolerance
    reference = gradients(twin)
    found = gradients(module)
    assert reference
    assert found.keys() == reference.keys()
    # A gradient that is zero but for rounding has no direction to compare; it is measured against the largest one.
    floor = 1e-4 * max(float(g.norm()) for g in reference.values())
    for name, gradient in reference.items():
        error = float((found[name] - gradient).norm()) / max(float(gradient.norm()), floor)
        assert error <= tolerance, f"{name}: {error:.1e}"
    return engine


def assert_same_call(
    module: nn.Module, step: Callable[..., torch.Tensor], compiled: Callable[..., torch.Tensor], x: torch.Tensor
) -> None:
    """Loss and gradients of one call of a step that is compiled already agree with eager."""
    twin = copy.deepcopy(module)
    module.zero_grad()
    twin.zero_grad()
    expected, actual = step(twin, x), compiled(module, x)
    expected.backward()
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for own, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)


def mostly(mark: pytest.MarkDecorator, cases: Iterable[Any], step: int) -> list[Any]:
    """Cases as parameters of a test, of which all but every `step`-th one have the mark, such as `pytest.mark.slow`."""
    return [case if k % step == 0 else pytest.param(case, marks=mark) for k, case in enumerate(cases)]
