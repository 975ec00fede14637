"""Memory of results: code after a graph can resize, replace, share and save it, as in eager."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compare import backend

Function = Callable[[Tensor], tuple[Tensor, ...]]


def values_of(w: Tensor) -> tuple[Tensor, ...]:
    """Results of ONNX Runtime's operators, of torch nodes, of several dtypes, empty ones and views."""
    hidden = w.exp() * w + 1
    values = hidden, hidden.cumsum(1), hidden > 1, hidden.argmax(), torch.complex(hidden, hidden).exp(), hidden[:0] * 2
    return *(value.detach() for value in values), (hidden * 2).detach()[:, ::2]


def forward(w: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return values_of(w)


def fused(w: Tensor) -> tuple[Tensor, ...]:
    return *values_of(w), (w.exp() * w).tanh().sum()


def split(w: Tensor) -> tuple[Tensor, ...]:
    return *values_of(w), (w.exp() * w).tanh()


def grow(value: Tensor) -> Any:
    return value.resize_(9, 7).flatten()[: value.numel()].shape


def shrink(value: Tensor) -> Any:
    return value.resize_(1, value.numel() // 2)


def write(value: Tensor) -> Any:
    out = value[:0] if value.dim() else value
    return torch.add(torch.ones(5, 6), 1, out=out.resize_(0)) if value.dtype == torch.float32 else value


def free(value: Tensor) -> Any:
    storage = value.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    return value.zero_()


def typed(value: Tensor) -> Any:
    value._typed_storage()._resize_(128)
    return value


def replace(value: Tensor) -> Any:
    return value.set_(torch.ones(128, dtype=value.dtype).untyped_storage(), 0, (3, 3), (3, 1))


def share(value: Tensor) -> Any:
    return value.share_memory_().is_shared(), value


def pickled(value: Tensor) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


ACTIONS: list[Callable[[Tensor], Any]] = [grow, shrink, write, free, typed, replace, share, pickled, saved]
OF_METADATA = (grow, shrink, write, replace)


@pytest.mark.parametrize("function", [forward, fused, split])
def test_results_are_resized_and_shared_as_in_eager(function: Function) -> None:
    compiled, w = torch.compile(function, backend=backend()), torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
    for action in ACTIONS:
        actual, expected = (
            # Autograd doesn't allow these for values that require gradients.
            [action(value.detach()) for value in values if not (value.requires_grad and action in OF_METADATA)]
            for values in (compiled(w), function(w))
        )
        torch.testing.assert_close(actual, expected, msg=lambda text, action=action: f"{action.__name__}: {text}")


def test_large_results_are_not_copied_and_keep_their_size() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2 + 1

    compiled, x = torch.compile(double, backend=backend()), torch.ones(2**19)
    for action in (shrink, replace, share, pickled, saved):
        torch.testing.assert_close(action(compiled(x)), action(double(x)))
    with pytest.raises(RuntimeError, match="resize storage that is not resizable"):
        compiled(x).resize_(2**20)


# Results that are views in memory: of a torch node without a session, of memory of a run, of a pool of another dtype.
LINEAR, LARGE = nn.Linear(8, 8), nn.Linear(256, 1024)
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "no session": (lambda x: F.linear(x, LINEAR.weight), torch.randn(2, 3, 8)),
    "small": (lambda x: LINEAR(x).tanh() + 1, torch.randn(4, 8)),
    "native": (lambda x: LARGE(x).tanh() + 1, torch.randn(512, 256)),
    "bfloat16": (lambda x: LARGE(x).bfloat16() * 2, torch.randn(1024, 256)),
    "float64": (lambda x: LARGE(x).double().cumsum(1), torch.randn(512, 256)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("change", ["mul_", "detach_"])
@pytest.mark.parametrize("name", VIEWS)
def test_results_can_be_changed_in_place(name: str, change: str, has_gradients: bool) -> None:
    """Autograd doesn't allow this for views that were made in an autograd function or without gradients."""
    function, x = VIEWS[name]
    factor = torch.full((1,), 2.0, requires_grad=True)
    compiled, outcomes = torch.compile(function, backend=backend()), []
    for own in (compiled, function):
        with torch.set_grad_enabled(has_gradients):
            result = own(x)
        result = result.mul_(factor.to(result.dtype)) if change == "mul_" else result.detach_()
        if result.requires_grad:
            result.sum().backward()
        outcomes.append((result.detach(), factor.grad, LINEAR.weight.grad))
        for parameter in (factor, LINEAR.weight):
            parameter.grad = None
    close = 1e-2 if name == "bfloat16" else 1e-4
    torch.testing.assert_close(*outcomes, rtol=close, atol=close)
