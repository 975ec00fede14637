"""Convolutions of images whose pixels are rows of channels, and their gradients, as machine code.

Source: Dukhan 2019 (indirect convolution).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import register_flop_formula

from lit_ort.errors import KernelError
from lit_ort.kernels.convolution_arguments import image_blocks, is_depthwise
from lit_ort.kernels.kernel_arguments import sum_dtype
from lit_ort.ops.operator import Allocator, Operator, define

if TYPE_CHECKING:
    from lit_ort.kernels.convolution_calls import Convolutions
    from lit_ort.kernels.convolution_words import Windows

# Of images with fewer channels most of a vector is empty.
FEWEST_CHANNELS = 8
_TO_CHANNELS_LAST = (0, 3, 1, 2)


@functools.cache
def convolutions() -> Convolutions | None:
    """The machine code of this process; None if there is none for this CPU, or llvmlite is not installed."""
    try:
        from lit_ort.kernels.convolution_calls import Convolutions  # loads LLVM

        return Convolutions()
    except (ImportError, KernelError):
        return None


def windows_of(
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Windows:
    """How a convolution reads images; torch accepts one number for both dimensions."""
    from lit_ort.kernels.convolution_words import Windows

    return Windows(*((sizes[0], sizes[-1]) for sizes in (kernel, stride, padding, dilation)), groups=groups)


def image_convolution(
    allocator: Allocator,
    images: torch.Tensor,
    weight: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    is_gradient: bool,
) -> torch.Tensor:
    """A convolution or, from the gradient of its result, that of its images; in float32 if these are bfloat16.

    Args:
        allocator: allocates the result, float[batch, out_height, out_width, outputs].
        images: float[batch, height, width, channels]; the gradient of the result if a gradient is computed.
        weight: float[outputs, kernel_height, kernel_width, channels / groups] of the convolution, or
            float[kernel_height, kernel_width, channels] if each channel is convolved by itself.
        size: the height and width of the result.
        stride, padding, dilation: height and width, in pixels, of the convolution.
        groups: into how many groups of channels it is cut.
        is_gradient: whether the gradient of images is computed, which is also a transposed convolution.
    """
    code = convolutions()
    assert code is not None, "the pass that makes these operators checks it"
    result = allocator.empty(len(images), *size, _outputs(weight, groups, is_gradient), dtype=sum_dtype(images.dtype))
    windows = windows_of(weight.shape[-3:-1], stride, padding, dilation, groups)
    first, second = (value.permute(_TO_CHANNELS_LAST) for value in (images.contiguous(), result))
    code.compute(first, weight.contiguous(), windows, is_gradient, second)
    return result


def _outputs(weight: torch.Tensor, groups: int, is_gradient: bool) -> int:
    if weight.dim() == 3:
        return weight.shape[2]
    return weight.shape[3] * groups if is_gradient else weight.shape[0]


def image_weight_gradient(
    allocator: Allocator,
    grad: torch.Tensor,
    images: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """The gradient of a convolution's weight, in the form in which the machine code writes it.

    It is float[outputs, runs, elements], of which `weight_gradient_of` is the gradient; if each channel is convolved by
    itself, it is the sum of float[parts, kernel_height, kernel_width, channels]. It is float32 if images are bfloat16.

    Args:
        allocator: allocates the result.
        grad: float[batch, out_height, out_width, outputs], of the convolution's result.
        images: float[batch, height, width, channels].
        kernel, stride, padding, dilation: height and width, in pixels, of the convolution.
        groups: into how many groups of channels the convolution is cut.
    """
    code = convolutions()
    assert code is not None, "the pass that makes these operators checks it"
    windows, channels = windows_of(kernel, stride, padding, dilation, groups), images.shape[3]
    first, second = (value.contiguous().permute(_TO_CHANNELS_LAST) for value in (grad, images))
    if is_depthwise(grad.shape[3], channels, groups):
        shape = (image_blocks(channels), *windows.kernel, channels)
    else:
        shape = (grad.shape[3], *code.runs(windows, channels, images.dtype))
    result = allocator.empty(*shape, dtype=sum_dtype(images.dtype))
    code.compute_weight_gradient(first, second, windows, result)
    return result


def weight_gradient_of(runs: torch.Tensor, kernel: Sequence[int], channels: int) -> torch.Tensor:
    """The gradient of a weight, float[outputs, kernel_height, kernel_width, channels], as a view of its runs.

    Args:
        runs: what `image_weight_gradient` computes.
        kernel: its height and width.
        channels: of a group.
    """
    elements = kernel[0] * kernel[-1] * channels // runs.shape[1]
    return runs[..., :elements].reshape(len(runs), kernel[0], kernel[-1], channels)


def _fake(images: torch.Tensor, weight: torch.Tensor, size: Sequence[int], *rest: Any) -> torch.Tensor:
    *_, groups, is_gradient = rest
    shape = images.shape[0], *size, _outputs(weight, groups, is_gradient)
    return images.new_empty(shape, dtype=sum_dtype(images.dtype))


def _fake_weight_gradient(grad: torch.Tensor, images: torch.Tensor, kernel: Sequence[int], *rest: Any) -> torch.Tensor:
    stride, padding, dilation, groups = rest
    channels = images.shape[3]
    if is_depthwise(grad.shape[3], channels, groups):
        return grad.new_empty(image_blocks(channels), kernel[0], kernel[-1], channels)
    code = convolutions()
    assert code is not None, "the pass that makes these operators checks it"
    shape = grad.shape[3], *code.runs(windows_of(kernel, stride, padding, dilation, groups), channels, grad.dtype)
    return grad.new_empty(shape, dtype=sum_dtype(grad.dtype))


_WINDOWS = "int[] stride, int[] padding, int[] dilation"
_SIZES = f"SymInt[] size, {_WINDOWS}, int groups"
_SCHEMA = f"image_convolution(Tensor images, Tensor weight, {_SIZES}, bool is_gradient) -> Tensor"
_OF_WEIGHT = f"image_weight_gradient(Tensor grad, Tensor images, int[] kernel, {_WINDOWS}, int groups) -> Tensor"
OPERATORS = (
    Operator(define(_SCHEMA, image_convolution, _fake), image_convolution, recomputable=False),
    Operator(
        define(_OF_WEIGHT, image_weight_gradient, _fake_weight_gradient), image_weight_gradient, recomputable=False
    ),
)


@register_flop_formula(torch.ops.lit_ort.image_convolution)
def _operations(images: Sequence[int], weight: Sequence[int], size: Sequence[int], *rest: Any, **_: Any) -> int:
    """The FLOP of a convolution or of its images' gradient, from shapes."""
    pixels = math.prod(images[1:3]) if rest[-1] else math.prod(size)
    return 2 * images[0] * pixels * math.prod(weight)


@register_flop_formula(torch.ops.lit_ort.image_weight_gradient)
def _operations_of_weight(
    grad: Sequence[int], images: Sequence[int], kernel: Sequence[int], *rest: Any, **_: Any
) -> int:
    """Likewise."""
    return 2 * math.prod(grad) * kernel[0] * kernel[-1] * images[3] // rest[-1]
