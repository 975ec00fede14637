"""Gradients of convolutions of small images as products, and the order of memory of images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_ort.ops import OPERATORS, convolution
from tests.ops.helpers import RecordingMemory

aten = torch.ops.aten
own = torch.ops.lit_ort
OPERATOR = OPERATORS[aten.convolution_backward.default]


def arguments(
    images: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int, dilation: int, mask: list[bool]
) -> tuple[Any, ...]:
    x, kernel = torch.randn(images), torch.randn(weight)
    rest = ([stride, stride], [padding, padding], [dilation, dilation], False, [0, 0], 1)
    result = aten.convolution(x, kernel, None, *rest)
    return torch.randn_like(result), x, kernel, [weight[0]], *rest, mask


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False], [True, False, True]])
@pytest.mark.parametrize(
    ("images", "kernel", "stride", "padding", "dilation"),
    [((3, 8, 4, 4), 3, 1, 1, 1), ((2, 8, 5, 7), 3, 2, 0, 1), ((2, 8, 6, 6), 2, 1, 2, 2), ((1, 8, 2, 2), 1, 1, 0, 1)],
)
def test_gradients_are_torchs(
    images: tuple[int, ...], kernel: int, stride: int, padding: int, dilation: int, mask: list[bool], last: bool
) -> None:
    given = arguments(images, (16, 8, kernel, kernel), stride, padding, dilation, mask)
    if last:
        given = (*(part.contiguous(memory_format=torch.channels_last) for part in given[:2]), *given[2:])
    found = OPERATOR.kernel(RecordingMemory(), *given)
    for wanted, actual, expected in zip(mask, found, aten.convolution_backward(*given), strict=True):
        if wanted:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        else:
            assert actual is None


def test_serves_large_weights_and_few_places() -> None:
    assert OPERATOR.supports is not None
    large = arguments((8, 512, 2, 2), (512, 512, 3, 3), 1, 1, 1, [True, True, False])
    assert OPERATOR.supports(*large)
    assert not OPERATOR.supports(*arguments((8, 512, 4, 4), (512, 512, 3, 3), 1, 1, 1, [True, True, False]))
    assert not OPERATOR.supports(*arguments((8, 64, 2, 2), (64, 64, 3, 3), 1, 1, 1, [True, True, False]))
    assert not OPERATOR.supports(*large[:9], 2, large[10])
    assert not OPERATOR.supports(*(part.double() if isinstance(part, Tensor) else part for part in large))
    assert OPERATOR.workspace_bytes is not None
    assert OPERATOR.workspace_bytes(*large) == 4 * 32 * (512 + 2 * 512 * 9)
    assert convolution.MOST_PLACES < 128


@pytest.mark.parametrize("last", [False, True])
def test_memory_formats(last: bool) -> None:
    wanted = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(2, 3, 4, 5)
    for images in (x, x.contiguous(memory_format=torch.channels_last), x[:, :2], x.mT):
        memory = RecordingMemory()
        actual = OPERATORS[own.in_memory_format.default].kernel(memory, images, last)
        assert torch.equal(actual, images)
        assert actual.is_contiguous(memory_format=wanted)
        is_there = images.is_contiguous(memory_format=wanted)
        assert actual is images if is_there else memory.holds(actual)
        torch.library.opcheck(own.in_memory_format.default, (images, last))
