"""Gradients of convolutions' weights where torch's are slow, in graphs whose convolutions are torch's.

They are computed by machine code from images with channels last. On two cores of an AMD EPYC (family 25, model 1) it
takes 0.64 to 0.85 of oneDNN's time for most kernels of 2 x 2 to 4 x 4 and 32 to 256 channels (of 32 measured, 3 take
1.02 to 1.33); for depthwise convolutions 0.4 for 7 x 7 kernels, and 0.1 for 512 channels of 2 x 2 pixels, but as much
for 3 x 3 kernels and many pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lit_ort._compat.torch_sizes import has_channels_last, hint_of
from lit_ort.kernels.convolution_arguments import is_depthwise
from lit_ort.kernels.kernel_arguments import DTYPES
from lit_ort.ops.image_convolution import (
    FEWEST_CHANNELS,
    convolutions,
    image_weight_gradient,
    weight_gradient_of,
)
from lit_ort.ops.operator import Allocator, Operator

aten = torch.ops.aten
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


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
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        settings = (stride, padding, dilation, transposed, output_padding, groups)
        tensors = (grad_output, input, weight, bias_sizes)
        of_input = aten.convolution_backward(*tensors, *settings, [True, False, False])[0]
    if output_mask[1]:
        # A transposed convolution is the gradient of a convolution of its results.
        pair = (input, grad_output) if transposed else (grad_output, input)
        grad, images = (value.permute(0, 2, 3, 1) for value in pair)
        windows = (weight.shape[2:], stride, padding, dilation)
        made = image_weight_gradient(allocator, grad, images, *windows, groups)
        if is_depthwise(grad.shape[3], images.shape[3], groups):
            of_weight = made.sum(0).permute(2, 0, 1).unsqueeze(1)
        else:
            of_weight = weight_gradient_of(made, weight.shape[2:], images.shape[3] // groups).permute(0, 3, 1, 2)
        if has_channels_last(input) or has_channels_last(weight):
            of_weight = of_weight.contiguous(memory_format=torch.channels_last)
        else:
            of_weight = allocator.empty(*weight.shape, dtype=weight.dtype).copy_(of_weight)
    if output_mask[2]:
        of_bias = grad_output.sum([0, 2, 3])
    return of_input, of_weight, of_bias


def _supports(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> bool:
    *_, transposed, _, groups, mask = rest
    is_plain = weight.dim() == 4 and weight.dtype in DTYPES
    if (
        not is_plain
        or not weight.dtype == grad_output.dtype == input.dtype
        or 0 in (grad_output.numel(), input.numel())
    ):
        return False
    has_channels = weight.shape[1] >= FEWEST_CHANNELS
    is_own = not transposed and is_depthwise(len(weight), input.shape[1], groups)
    return mask[1] and (has_channels or is_own) and convolutions() is not None


def _workspace_bytes(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> int:
    *_, groups, mask = rest
    if weight.dim() != 4 or not mask[1]:
        return 0
    elements = weight.numel()
    if weight.shape[1] >= FEWEST_CHANNELS or groups > 1:
        elements += sum(_elements(value) for value in (grad_output, input) if not has_channels_last(value))
    return weight.dtype.itemsize * elements


def _elements(value: torch.Tensor) -> int:
    return math.prod(hint_of(size) or 0 for size in value.shape)


OPERATORS = (
    Operator(
        aten.convolution_backward.default,
        convolution_backward,
        workspace_bytes=_workspace_bytes,
        recomputable=False,
        supports=_supports,
    ),
)
