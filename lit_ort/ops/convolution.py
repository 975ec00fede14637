"""The gradients of a convolution of small images with a large weight, computed as matmuls.

oneDNN reorders such a weight and its gradient, which takes longer than the matmuls. For 512 channels and a 3 x 3
kernel, the gradients of weight and images take 5.6 ms as matmuls and 11.4 ms with oneDNN at 8 images of 2 x 2, and 6.8
and 10.4 ms at 16 images, on two cores of an AMD EPYC (family 25). oneDNN is faster from about 128 output pixels.

Source: Chellapilla, Puri and Simard 2006 (patches as the rows of a matrix).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lit_ort._compat.torch_sizes import hint_of
from lit_ort.ops.operator import Allocator, Operator

aten = torch.ops.aten
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
# Matmuls are faster up to this number of output pixels in a batch, and from this number of elements of the weight.
MOST_PIXELS, LEAST_WEIGHT = 64, 2**20


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
        grad_output: float32[batch, outputs, height, width]. input: float32[batch, channels, ...].
        weight: float32[outputs, channels, ...].
    """
    batch, outputs = grad_output.shape[:2]
    kernel, size = weight.shape[2:], input.shape[2:]
    # [outputs, batch * pixels] and [outputs, channels * kernel].
    grad = grad_output.reshape(batch, outputs, -1).transpose(0, 1).reshape(outputs, -1)
    matrix = weight.reshape(outputs, -1)
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        patches = torch.mm(matrix.t(), grad).view(matrix.shape[1], batch, -1).transpose(0, 1)
        of_input = aten.col2im(patches, size, kernel, dilation, padding, stride)
    if output_mask[1]:
        patches = aten.im2col(input, kernel, dilation, padding, stride).transpose(0, 1).reshape(matrix.shape[1], -1)
        out = allocator.empty(*matrix.shape, dtype=weight.dtype)
        of_weight = torch.mm(grad, patches.t(), out=out).view(weight.shape)
    if output_mask[2]:
        of_bias = grad.sum(1)
    return of_input, of_weight, of_bias


def _supports(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> bool:
    _, _, _, _, transposed, _, groups, _ = rest
    is_plain = not transposed and groups == 1 and weight.dim() == 4 and weight.dtype == torch.float32
    pixels = grad_output.shape[0] * math.prod(grad_output.shape[2:])
    return is_plain and 0 < pixels <= MOST_PIXELS and weight.numel() >= LEAST_WEIGHT


def _bytes(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *_: object) -> int:
    if weight.dim() != 4 or weight.numel() < LEAST_WEIGHT:
        return 0
    pixels = math.prod(hint_of(size) for size in (grad_output.shape[0], *grad_output.shape[2:]))
    return 4 * pixels * (len(weight) + 2 * weight.numel() // len(weight)) if pixels <= MOST_PIXELS else 0


OPERATORS = (
    Operator(
        aten.convolution_backward.default,
        convolution_backward,
        workspace_bytes=_bytes,
        recomputable=False,
        supports=_supports,
    ),
)
