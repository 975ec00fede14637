"""Convolutions and their gradients where torch's are slow.

Gradients of weights are computed by machine code from images with channels last. On two cores of an AMD EPYC (family
25, model 1) it takes 0.64 to 0.85 of oneDNN's time for most kernels of 2 x 2 to 4 x 4 and 32 to 256 channels (of 32
measured, 3 take 1.02 to 1.33); for depthwise convolutions 0.4 for 7 x 7 kernels, and 0.1 for 512 channels of 2 x 2
pixels, but as much for 3 x 3 kernels and many pixels.

oneDNN reorders a large weight, which takes longer than a matmul of small images or their gradient. For 512 channels and
a 3 x 3 kernel both take 2.8 and 2.5 ms as matmuls and 3.5 and 3.2 ms with oneDNN at 8 images of 2 x 2, on the same CPU.
oneDNN is as fast from about 100 output pixels.

Source: Chellapilla, Puri and Simard 2006 (patches as the rows of a matrix).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lit_ort._compat.torch_sizes import has_channels_last, hint_of
from lit_ort.errors import KernelError
from lit_ort.kernels.kernel_arguments import DTYPES
from lit_ort.ops.operator import Allocator, Operator

if TYPE_CHECKING:
    from lit_ort.kernels.weight_gradients import WeightGradients, Windows

aten = torch.ops.aten
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
# The matmul is faster up to this number of output pixels in a batch, and from this number of elements of the weight.
MOST_PIXELS, LEAST_WEIGHT = 64, 2**20
# The machine code is faster from this number of channels.
FEWEST_CHANNELS = 8


@functools.cache
def weight_gradients() -> WeightGradients | None:
    """The machine code of this process; None if there is none for this CPU, or llvmlite is not installed."""
    try:
        from lit_ort.kernels.weight_gradients import WeightGradients  # loads LLVM

        return WeightGradients()
    except (ImportError, KernelError):
        return None


def convolution(
    allocator: Allocator,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """A convolution of small images.

    Args:
        allocator: allocates the result.
        input: float[batch, channels, height, width]. weight: float[outputs, channels, ...]. bias: float[outputs].
    """
    batch, outputs = len(input), len(weight)
    stride, padding, dilation = map(_pair, (stride, padding, dilation))
    patches = aten.im2col(input, weight.shape[2:], dilation, padding, stride)
    columns = patches.transpose(0, 1).reshape(patches.shape[1], -1)
    pixels = torch.mm(weight.reshape(outputs, -1), columns).view(outputs, batch, -1)
    if bias is not None:
        pixels += bias[:, None, None]
    result = allocator.empty(*_result_shape(input, weight, stride, padding, dilation), dtype=input.dtype)
    result.view(batch, outputs, -1).copy_(pixels.transpose(0, 1))
    return result


def convolution_backward(
    allocator: Allocator,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Gradients:
    """The gradients of a convolution's images, weight and bias, or None for those that `output_mask` excludes.

    Args:
        allocator: allocates the weight's gradient.
        grad_output: float[batch, outputs, height, width]. input: float[batch, channels, ...].
        weight: float[outputs, channels, ...], or float[channels, outputs, ...] if it is transposed.
    """
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    windows = tuple(map(_pair, (weight.shape[2:], dilation, padding, stride)))
    is_small = not transposed and groups == 1 and _is_of_small_images(grad_output.shape, weight)
    of_input = of_weight = of_bias = None
    if is_small:
        of_input, of_weight = _of_small_images(allocator, grad_output, input, weight, windows, output_mask)
    elif output_mask[0]:
        tensors = (grad_output, input, weight, bias_sizes)
        of_input = aten.convolution_backward(*tensors, *settings, [True, False, False])[0]
    if output_mask[1] and not is_small:
        # A transposed convolution is the gradient of a convolution of its results.
        pair = (input, grad_output) if transposed else (grad_output, input)
        grad, images = (value.contiguous(memory_format=torch.channels_last) for value in pair)
        function = _of_weight if groups == 1 else _of_depthwise_weight
        of_weight = function(allocator, grad, images, weight, _windows(*windows))
        if has_channels_last(input) or has_channels_last(weight):
            of_weight = of_weight.contiguous(memory_format=torch.channels_last)
        else:
            of_weight = allocator.empty(*weight.shape, dtype=weight.dtype).copy_(of_weight)
    if output_mask[2]:
        of_bias = grad_output.sum([0, 2, 3])
    return of_input, of_weight, of_bias


def _of_small_images(
    allocator: Allocator,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    windows: Sequence[Sequence[int]],
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of images and weight as matmuls of patches."""
    batch, outputs = grad_output.shape[:2]
    # [outputs, batch * pixels] and [outputs, channels * kernel].
    grad = grad_output.reshape(batch, outputs, -1).transpose(0, 1).reshape(outputs, -1)
    matrix = weight.reshape(outputs, -1)
    of_input = of_weight = None
    if output_mask[0]:
        patches = torch.mm(matrix.t(), grad).view(matrix.shape[1], batch, -1).transpose(0, 1)
        of_input = aten.col2im(patches, input.shape[2:], *windows)
    if output_mask[1]:
        patches = aten.im2col(input, *windows).transpose(0, 1).reshape(matrix.shape[1], -1)
        out = allocator.empty(*matrix.shape, dtype=weight.dtype)
        of_weight = torch.mm(grad, patches.t(), out=out).view(weight.shape)
    return of_input, of_weight


def _of_weight(
    allocator: Allocator, grad: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, windows: Windows
) -> torch.Tensor:
    code = weight_gradients()
    assert code is not None
    outputs, channels, height, width = weight.shape
    elements, room = code.run_elements(windows, channels, weight.dtype)
    runs = allocator.empty(outputs, height * windows.runs_across, room, dtype=weight.dtype)
    code.compute(grad, images, windows, runs)
    return runs[..., :elements].reshape(outputs, height, width, channels).permute(0, 3, 1, 2)


def _of_depthwise_weight(
    allocator: Allocator, grad: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, windows: Windows
) -> torch.Tensor:
    code = weight_gradients()
    assert code is not None
    parts = allocator.empty(code.image_blocks(images), *windows.kernel, len(weight), dtype=weight.dtype)
    code.compute_depthwise(grad, images, windows, parts)
    return (parts[0] if len(parts) == 1 else parts.sum(0)).permute(2, 0, 1).unsqueeze(1)


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    """A size for each dimension; torch accepts one for both."""
    return sizes[0], sizes[-1]


def _windows(
    kernel: tuple[int, int], dilation: tuple[int, int], padding: tuple[int, int], stride: tuple[int, int]
) -> Windows:
    from lit_ort.kernels.weight_gradients import Windows

    return Windows(kernel, stride, padding, dilation)


def _result_shape(
    input: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    sizes = zip(input.shape[2:], weight.shape[2:], *map(_pair, (stride, padding, dilation)), strict=True)
    return len(input), len(weight), *(1 + (one + 2 * p - d * (kernel - 1) - 1) // s for one, kernel, s, p, d in sizes)


def _is_of_small_images(shape: Sequence[int], weight: torch.Tensor) -> bool:
    """Whether a convolution with a result of this shape, and the gradient of its images, are faster as matmuls."""
    if weight.numel() < LEAST_WEIGHT:
        return False
    # The size of one that isn't known is 0.
    return 0 < math.prod(hint_of(size) or 0 for size in (shape[0], *shape[2:])) <= MOST_PIXELS


def _is_plain(weight: torch.Tensor, *others: torch.Tensor) -> bool:
    return weight.dim() == 4 and weight.dtype in DTYPES and all(value.dtype == weight.dtype for value in others)


def _supports(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> bool:
    if weight.numel() < LEAST_WEIGHT:
        return False
    *windows, transposed, _, groups = rest
    # Results of images with channels last have them too.
    is_contiguous = input.is_contiguous() and weight.is_contiguous()
    if transposed or groups != 1 or not is_contiguous or not _is_plain(weight, input):
        return False
    return _is_of_small_images(_result_shape(input, weight, *windows), weight)


def _supports_backward(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> bool:
    *_, transposed, _, groups, mask = rest
    if not _is_plain(weight, grad_output, input) or 0 in (grad_output.numel(), input.numel()):
        return False
    if not transposed and groups == 1 and _is_of_small_images(grad_output.shape, weight):
        return True
    is_depthwise = not transposed and groups == len(weight) and weight.shape[1] == 1
    has_channels = groups == 1 and weight.shape[1] >= FEWEST_CHANNELS
    return mask[1] and (has_channels or is_depthwise) and weight_gradients() is not None


def _backward_bytes(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> int:
    *_, groups, mask = rest
    if weight.dim() != 4 or not mask[1]:
        return 0
    elements, outputs, pixels = weight.numel(), len(weight), _elements(grad_output) // len(weight)
    if groups == 1 and _is_of_small_images(grad_output.shape, weight):
        elements = pixels * (outputs + 2 * weight.numel() // outputs)
    elif weight.shape[1] >= FEWEST_CHANNELS or groups > 1:
        elements += sum(_elements(value) for value in (grad_output, input) if not has_channels_last(value))
    return weight.dtype.itemsize * elements


def _elements(value: torch.Tensor) -> int:
    return math.prod(hint_of(size) or 0 for size in value.shape)


OPERATORS = (
    Operator(aten.convolution.default, convolution, recomputable=False, supports=_supports),
    Operator(
        aten.convolution_backward.default,
        convolution_backward,
        workspace_bytes=_backward_bytes,
        recomputable=False,
        supports=_supports_backward,
    ),
)
