"""Values that torch conjugates when they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.compare import backend


def test_they_are_conjugated_in_memory_beside_regions() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        return torch.fft.irfft(torch.einsum("bix,iox->box", torch.fft.rfft(x), weight), n=16).tanh().square().mean()

    x, engine = torch.randn(3, 4, 16), backend()
    weight = torch.randn(4, 5, 9, dtype=torch.complex64, requires_grad=True)
    actual, expected = torch.compile(step, backend=engine)(x, weight), step(x, weight)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, weight), torch.autograd.grad(expected, weight))
    assert engine.compile_log.graphs[0].regions
