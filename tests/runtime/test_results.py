"""Memory of results: code after a graph can resize, replace, share and save it, as in eager."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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
