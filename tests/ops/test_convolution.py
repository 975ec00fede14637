"""Gradients of convolutions of small images as matmuls, and memory formats of images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_ort.ops import OPERATORS, convolution
from tests.ops.helpers import RecordingAllocator

aten = torch.ops.aten
in_memory_format = torch.ops.lit_ort.in_memory_format.default
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
def test_gradients_match_torch(
    images: tuple[int, ...], kernel: int, stride: int, padding: int, dilation: int, mask: list[bool], last: bool
) -> None:
    args = arguments(images, (16, 8, kernel, kernel), stride, padding, dilation, mask)
    if last:
        args = (*(tensor.contiguous(memory_format=torch.channels_last) for tensor in args[:2]), *args[2:])
    gradients = OPERATOR.kernel(RecordingAllocator(), *args)
    for is_wanted, actual, expected in zip(mask, gradients, aten.convolution_backward(*args), strict=True):
        if is_wanted:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        else:
            assert actual is None


def test_supports_large_weights_and_few_pixels() -> None:
    assert OPERATOR.supports is not None
    large = arguments((8, 512, 2, 2), (512, 512, 3, 3), 1, 1, 1, [True, True, False])
    assert OPERATOR.supports(*large)
    assert not OPERATOR.supports(*arguments((8, 512, 4, 4), (512, 512, 3, 3), 1, 1, 1, [True, True, False]))
    assert not OPERATOR.supports(*arguments((8, 64, 2, 2), (64, 64, 3, 3), 1, 1, 1, [True, True, False]))
    assert not OPERATOR.supports(*large[:9], 2, large[10])
    assert not OPERATOR.supports(*(value.double() if isinstance(value, Tensor) else value for value in large))
    assert OPERATOR.workspace_bytes is not None
    assert OPERATOR.workspace_bytes(*large) == 4 * 32 * (512 + 2 * 512 * 9)
    assert convolution.MOST_PIXELS < 128


@pytest.mark.parametrize("last", [False, True])
def test_memory_formats(last: bool) -> None:
    memory_format = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(2, 3, 4, 5)
    for images in (x, x.contiguous(memory_format=torch.channels_last), x[:, :2], x.mT):
        allocator = RecordingAllocator()
        actual = OPERATORS[in_memory_format].kernel(allocator, images, last)
        assert torch.equal(actual, images)
        assert actual.is_contiguous(memory_format=memory_format)
        is_unchanged = images.is_contiguous(memory_format=memory_format)
        assert actual is images if is_unchanged else allocator.contains(actual)
        torch.library.opcheck(in_memory_format, (images, last))
