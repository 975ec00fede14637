"""Kernels that depend on the strides of their arguments: results and gradients as in eager.

`python -m tests.operators.kernels` finds such kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.compare import backend

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


def heads(x: Tensor) -> Tensor:
    """x: float[batch, 16, height, width] as heads of attention."""
    return x.flatten(2).transpose(1, 2).unflatten(-1, (2, 8)).transpose(1, 2)


def attention(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(heads(x), heads(x * 2), heads(x + 1))


def group_norm(x: Tensor) -> Tensor:
    return functional.group_norm(x, 2, x[0, :, 0, 0], x[1, :, 0, 0])


def sum_of_group_norm(x: Tensor) -> Tensor:
    return (group_norm(x) + x.mean()).sum()


def ctc(x: Tensor) -> Tensor:
    targets = torch.arange(24).view(4, 6) % 4 + 1
    lengths = torch.full((4,), 8), torch.full((4,), 3)
    return functional.ctc_loss(
        x.flatten(0, 1)[:, :, :8].permute(2, 0, 1)[..., ::2].log_softmax(-1), targets[:, ::2], *lengths
    )


def bag(x: Tensor) -> Tensor:
    return functional.embedding_bag((torch.arange(18).view(3, 6) % 8)[:, ::2], x.flatten(1)[:, :8].t(), mode="sum")


def unpooled(x: Tensor) -> Tensor:
    return nn.MaxUnpool2d(2)(*nn.MaxPool2d(2, return_indices=True)(x))


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x, x[-1:])[1]


def images(*shape: int, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    return values.contiguous(memory_format=memory_format)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "attention of images with channels last": (attention, images(2, 16, 4, 4, memory_format=LAST)),
    "attention of permuted queries": (
        lambda x: functional.scaled_dot_product_attention(x, x, x),
        images(2, 4, 16, 32).transpose(2, 3),
    ),
    "GroupNorm with channels last": (group_norm, images(2, 4, 5, 6, memory_format=LAST)),
    "GroupNorm of volumes with channels last": (
        lambda x: functional.group_norm(x, 2),
        images(2, 4, 3, 5, 6, memory_format=LAST_3D),
    ),
    "GroupNorm of a slice": (lambda x: group_norm(x[..., ::2]), images(2, 4, 5, 6)),
    "GroupNorm of an expanded value": (lambda x: group_norm(x[:1].expand(3, 4, 5, 6)), images(2, 4, 5, 6)),
    "GroupNorm, converted": (lambda x: group_norm(x).contiguous(memory_format=LAST).relu(), images(2, 4, 5, 6)),
    "GroupNorm, summed": (sum_of_group_norm, images(2, 4, 5, 6, memory_format=LAST)),
    "CTC loss of a slice": (ctc, images(2, 2, 10, 10)),
    "EmbeddingBag with a slice of indices": (bag, images(4, 4, 4)),
    "AdaptiveMaxPool3d": (lambda x: functional.adaptive_max_pool3d(x.transpose(2, 4), 2), images(2, 3, 4, 6, 8)),
    "LSTM of a slice": (nn.LSTM(4, 5, batch_first=True), images(6, 3, 8).transpose(0, 1)[..., ::2]),
    "real parts of complex numbers, summed": (
        lambda x: (torch.view_as_real(torch.fft.rfft(x.permute(2, 1, 0))) * torch.ones(2)).sum(),
        images(4, 3, 2),
    ),
    "replicated padding": (
        lambda x: functional.pad(x, (1, 1, 1, 1, 1, 1), "replicate"),
        images(2, 4, 3, 5, 6, memory_format=LAST_3D),
    ),
    "interpolation of a permuted value": (
        lambda x: functional.interpolate(x, scale_factor=2.0),
        images(4, 3, 2).transpose(0, 2),
    ),
    "MaxUnpool2d with channels last": (unpooled, images(2, 4, 4, 6, memory_format=LAST)),
    "last state of a GRU from a permuted state": (LastState(), images(5, 3, 4).transpose(1, 2)),
}
SAMPLE = ("attention of images with channels last", "GroupNorm with channels last", "GroupNorm of a slice")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_same_as_eager(name: str) -> None:
    function, x = CASES[name]
    compiled = torch.compile(function, backend=backend(disable_passes=("regions",)))
    values: list[list[Any]] = []
    for call in (function, compiled):
        copy = x.detach().clone().requires_grad_()
        result = call(copy)
        result = result[0] if isinstance(result, tuple) else result
        incoming = torch.linspace(0.5, 2, result.numel()).view(result.shape)
        values.append([result.detach(), result.stride(), *torch.autograd.grad(result, copy, incoming)])
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-5)
