"""Convolutions and their gradients: against torch's in float64, between guard pages, for any number of threads."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv2d

from lit_ort.kernels.convolution_arguments import image_blocks
from lit_ort.kernels.convolution_calls import Convolutions
from lit_ort.kernels.convolution_words import Windows
from lit_ort.kernels.kernel_arguments import sum_dtype
from lit_ort.kernels.machine_code import host_cpu
from lit_ort.ops.image_convolution import weight_gradient_of
from tests.kernels.test_generated_regions import threads
from tests.regions.guarded import guarded

HOST = Convolutions()
LAST = torch.channels_last
DTYPES = [torch.float32, torch.float64, *([torch.bfloat16] if HOST.multiplies_bfloat16 else [])]


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    channels: int
    outputs: int
    size: tuple[int, int]
    windows: Windows
    dtype: torch.dtype = torch.float32

    @property
    def groups(self) -> int:
        return self.windows.groups

    @property
    def is_depthwise(self) -> bool:
        return 1 < self.groups == self.channels == self.outputs

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *self.size)

    @property
    def weight(self) -> tuple[int, ...]:
        return (self.outputs, self.channels // self.groups, *self.windows.kernel)


def pair(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(*[st.integers(low, high)] * 2)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    windows = Windows(draw(pair(1, 4)), draw(pair(1, 3)), draw(pair(0, 3)), draw(pair(1, 3)))
    geometry = zip(windows.kernel, windows.padding, windows.dilation, strict=True)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in geometry]
    size = (draw(st.integers(least[0], least[0] + 18)), draw(st.integers(least[1], least[1] + 18)))
    channels = draw(st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17, 33, 64]))
    outputs = draw(st.sampled_from([1, 5, 6, 7, 12, 16, 40, 97]))
    dtype = draw(st.sampled_from(DTYPES))
    if dtype == torch.bfloat16:
        # Two channels are a pair.
        channels, outputs = 2 * channels, 2 * outputs
    elif channels > 1 and draw(st.booleans()):
        outputs, windows = channels, dataclasses.replace(windows, groups=channels)
    else:
        groups = draw(st.sampled_from([1, 1, 2, 3]))
        channels, outputs, windows = groups * channels, groups * outputs, dataclasses.replace(windows, groups=groups)
    return Case(draw(st.integers(1, 3)), channels, outputs, size, windows, dtype)


def assert_right(code: Convolutions, case: Case, at_end: bool = False) -> None:
    windows, groups = case.windows, case.groups
    rest = (windows.stride, windows.padding, windows.dilation, groups)
    images = torch.randn(case.shape, dtype=case.dtype).contiguous(memory_format=LAST)
    weight = torch.randn(case.weight, dtype=torch.float64, requires_grad=True)
    result = conv2d(images.double(), weight, None, *rest)
    grad = torch.randn_like(result).to(case.dtype).contiguous(memory_format=LAST)
    (expected,) = torch.autograd.grad(result, weight, grad.double())
    # [outputs, kernel, channels], or [parts, kernel, channels] of a depthwise convolution.
    shape = (case.outputs, *code.runs(windows, case.channels, case.dtype))
    if case.is_depthwise:
        shape = (image_blocks(case.channels), *windows.kernel, case.channels)
    flat = [value.permute(0, 2, 3, 1).flatten() for value in (grad, images)]
    memory, kept = guarded([*flat, torch.empty(math.prod(shape), dtype=sum_dtype(case.dtype))], at_end=at_end)
    grad, images = (
        one.view(value.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        for one, value in zip(memory, (grad, images), strict=False)
    )
    runs = memory[2].view(shape)
    code.compute_weight_gradient(grad, images, windows, runs)
    if case.is_depthwise:
        actual = runs.sum(0).permute(2, 0, 1).unsqueeze(1)
    else:
        actual = weight_gradient_of(runs, windows.kernel, case.channels // groups).permute(0, 3, 1, 2)
    assert_close(actual, expected)
    del kept
    assert_images_right(code, case, at_end)


def assert_images_right(code: Convolutions, case: Case, at_end: bool) -> None:
    """Checks a convolution and the gradient of its images."""
    windows = case.windows
    images = torch.randn(case.shape).to(case.dtype).double().requires_grad_()
    weight = torch.randn(case.weight).to(case.dtype).double()
    result = conv2d(images, weight, None, windows.stride, windows.padding, windows.dilation, case.groups)
    grad = torch.randn_like(result).to(case.dtype).double()
    (of_images,) = torch.autograd.grad(result, images, grad)
    for is_gradient, read, expected in ((False, images, result), (True, grad, of_images)):
        shapes = [tuple(value.permute(0, 2, 3, 1).shape) for value in (read, expected)]
        order = (1, 2, 3, 0) if case.is_depthwise else (0, 2, 3, 1)
        flat = [read.detach().permute(0, 2, 3, 1).flatten(), weight.permute(order).flatten()]
        flat = [value.to(case.dtype) for value in flat]
        unset = torch.full((math.prod(shapes[1]),), math.nan, dtype=sum_dtype(case.dtype))
        (first, matrix, second), kept = guarded([*flat, unset], at_end=at_end)
        first, second = (value.view(shape) for value, shape in zip((first, second), shapes, strict=True))
        shape = windows.kernel if case.is_depthwise else (case.outputs, *windows.kernel)
        matrix = matrix.view(*shape, -1)
        code.compute(first.permute(0, 3, 1, 2), matrix, windows, is_gradient, second.permute(0, 3, 1, 2))
        assert_close(second.permute(0, 3, 1, 2), expected)
        del kept


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = 3e-6 if actual.dtype == torch.float32 else 1e-13
    error = (actual.double() - expected.detach()).abs().max()
    assert error <= bound * max(1.0, float(expected.detach().abs().max()))


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans())
def test_generated_convolutions(case: Case, at_end: bool) -> None:
    assert_right(HOST, case, at_end)


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_widths_of_vectors(vector_bytes: int, dtype: torch.dtype) -> None:
    code = Convolutions(dataclasses.replace(host_cpu(), vector_bytes=vector_bytes))
    for channels, outputs, kernel in ((3, 7, (3, 3)), (16, 30, (3, 2)), (40, 13, (1, 1))):
        # More pixels and columns than a panel has.
        windows = Windows(kernel, (1, 1), (1, 1), (1, 1))
        assert_right(code, Case(2, channels, outputs, (14, 15), windows, dtype), at_end=True)
        depthwise = dataclasses.replace(windows, groups=channels)
        assert_right(code, Case(2, channels, channels, (9, 10), depthwise, dtype), at_end=True)
        grouped = dataclasses.replace(windows, groups=3)
        assert_right(code, Case(2, 3 * channels, 3 * outputs, (9, 10), grouped, dtype), at_end=True)


def test_large_weights_and_many_pixels() -> None:
    windows = Windows((3, 3), (1, 1), (1, 1), (1, 1))
    assert_right(HOST, Case(1, 160, 200, (4, 4), windows))
    assert_right(HOST, Case(4, 16, 16, (40, 40), windows))


def test_results_are_the_same_for_any_number_of_threads() -> None:
    windows = Windows((3, 3), (2, 2), (1, 1), (1, 1))
    images = torch.randn(4, 24, 17, 17).contiguous(memory_format=LAST)
    grad = torch.randn(4, 50, 9, 9).contiguous(memory_format=LAST)
    results = []
    for count in (1, 2, 3, 16):
        with threads(count):
            results.append(torch.empty(50, *HOST.runs(windows, 24, torch.float32)))
            HOST.compute_weight_gradient(grad, images, windows, results[-1])
    assert all(torch.equal(result, results[0]) for result in results)
