"""Gradients of weights in machine code, and memory formats of images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_ort.ops import OPERATORS
from tests.ops.helpers import RecordingAllocator

aten = torch.ops.aten
in_memory_format = torch.ops.lit_ort.in_memory_format.default
BACKWARD = OPERATORS[aten.convolution_backward.default]


def forward_arguments(
    images: tuple[int, ...],
    weight: tuple[int, ...],
    stride: int,
    padding: int,
    dilation: int,
    transposed: bool = False,
    groups: int = 1,
) -> tuple[Any, ...]:
    rest = ([stride, stride], [padding, padding], [dilation, dilation], transposed, [0, 0], groups)
    return torch.randn(images), torch.randn(weight), torch.randn(weight[int(not transposed) - 1]), *rest


def arguments(mask: list[bool], *geometry: Any) -> tuple[Any, ...]:
    x, kernel, bias, *rest = forward_arguments(*geometry)
    return torch.randn_like(aten.convolution(x, kernel, None, *rest)), x, kernel, [len(bias)], *rest, mask


IMAGES = [
    ((3, 8, 4, 4), (16, 8, 3, 3), 1, 1, 1),
    ((2, 8, 5, 7), (16, 8, 3, 3), 2, 0, 1),
    ((2, 8, 6, 6), (16, 8, 2, 2), 1, 2, 2),
    ((1, 8, 2, 2), (16, 8, 1, 1), 1, 0, 1),
]
TRANSPOSED = ((2, 9, 5, 6), (9, 16, 4, 3), 2, 1, 1, True)
DEPTHWISE = ((2, 40, 7, 6), (40, 1, 3, 5), 2, 2, 1, False, 40)


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False], [True, True, False]])
@pytest.mark.parametrize("geometry", [*IMAGES, TRANSPOSED, DEPTHWISE])
def test_gradients_match_torch(geometry: tuple[Any, ...], mask: list[bool], last: bool) -> None:
    args = arguments(mask, *geometry)
    if last:
        args = (*(tensor.contiguous(memory_format=torch.channels_last) for tensor in args[:2]), *args[2:])
    assert BACKWARD.supports is not None
    assert BACKWARD.supports(*args)
    gradients = BACKWARD.kernel(RecordingAllocator(), *args)
    for is_wanted, actual, expected in zip(mask, gradients, aten.convolution_backward(*args), strict=True):
        if is_wanted:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        else:
            assert actual is None


@pytest.mark.parametrize("weight", [(16, 8, 3, 3), (8, 1, 3, 3)], ids=["all channels", "depthwise"])
def test_one_size_for_both_dimensions(weight: tuple[int, ...]) -> None:
    """As of `padding="valid"`, and of strides that are tuples of one element."""
    groups = 8 if weight[1] == 1 else 1
    x, w = torch.randn(2, weight[1] * groups, 5, 5), torch.randn(weight)
    rest = ([2], [0], [1], False, [0], groups)
    grad = torch.randn_like(aten.convolution(x, w, None, *rest))
    backward = (grad, x, w, None, *rest, [True, True, False])
    pairs = zip(BACKWARD.kernel(RecordingAllocator(), *backward), aten.convolution_backward(*backward), strict=True)
    for actual, wanted in list(pairs)[:2]:
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_supports_gradients_of_weights() -> None:
    assert BACKWARD.supports is not None
    args = arguments([True, True, False], *IMAGES[0])
    assert BACKWARD.supports(*(value.double() if isinstance(value, Tensor) else value for value in args))
    assert not BACKWARD.supports(*(value.bfloat16() if isinstance(value, Tensor) else value for value in args))
    assert not BACKWARD.supports(
        *arguments([True, True, False], (2, 8, 5, 5), (16, 1, 3, 3), 1, 1, 1, False, 8)[:9], 8, args[10]
    )
    assert not BACKWARD.supports(*args[:10], [True, False, True])
    assert not BACKWARD.supports(*arguments([True, False, False], *IMAGES[0]))
    assert not BACKWARD.supports(args[0][:0], args[1][:0], *args[2:])
    assert not BACKWARD.supports(*arguments([True, True, False], (2, 3, 5, 5), (16, 3, 3, 3), 1, 1, 1))
    assert BACKWARD.workspace_bytes is not None
    assert BACKWARD.workspace_bytes(*args) == 4 * (16 * 8 * 9 + args[0].numel() + args[1].numel())


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
