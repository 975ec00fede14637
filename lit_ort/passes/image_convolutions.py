"""Writes convolutions of images with channels last, and their gradients, as operators of pixels in rows.

In:  `convolution(images, weight, bias)` and its `convolution_backward`, transposed ones and those of groups too
Out: `image_convolution(pixels, weight)`, which also computes gradients of images, and `image_weight_gradient`; those
     in bfloat16 have float32 results, which are rounded where bfloat16 is read
Saves oneDNN's reorders of weights and results; native sessions compute these operators in their own memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, first_argument
from lit_ort._compat.torch_sizes import hint_of
from lit_ort.kernels.convolution_arguments import is_depthwise
from lit_ort.kernels.kernel_arguments import sum_dtype
from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from lit_ort.ops.image_convolution import FEWEST_CHANNELS, convolutions
from lit_ort.passes.exact_results import cast, rounded
from lit_ort.passes.node_builder import NodeBuilder, replace_elements, replace_nodes
from lit_ort.passes.pixel_nodes import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    FORMAT,
    contiguous,
    erase_unused_formats,
    has_last,
    images_of,
)

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_CONVOLUTION = torch.ops.lit_ort.image_convolution.default
_OF_WEIGHT = torch.ops.lit_ort.image_weight_gradient.default
_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16})
# What a thread copies of the weight is on its stack.
MOST_TAPS = 225
_MOST_OF_LINE = 2**20


def convolve_images(module: fx.GraphModule) -> int:
    """Rewrites convolutions in a graph, in place. Returns their number."""
    values = _Pixels(module.graph)
    fired = replace_nodes(
        module, lambda node: node.target is _FORWARD and _is_fit(node, 0), functools.partial(_forward, values)
    )
    fired += replace_elements(
        module, lambda node: node.target is _BACKWARD and _is_fit(node, 1), functools.partial(_gradient, values)
    )
    erase_unused_formats(module.graph)
    return fired


class _Pixels:
    """Images and weights with channels last, as views that operators copy if they need to, one of each in a dtype."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._views: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def of(self, images: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self._view(first_argument(images) if images.target is FORMAT else images, dtype, False)

    def of_weight(self, weight: fx.Node, dtype: torch.dtype, is_depthwise: bool) -> fx.Node:
        return self._view(weight, dtype, is_depthwise)

    def _view(self, value: fx.Node, dtype: torch.dtype, is_depthwise: bool) -> fx.Node:
        if (value, dtype) not in self._views:
            with self._graph.inserting_after(value):
                builder = NodeBuilder(self._graph, value.meta)
                exact = cast(builder, value, dtype)
            with self._graph.inserting_after(exact):
                view = builder(aten.permute.default, exact, CHANNELS_LAST)
            if is_depthwise:
                with self._graph.inserting_after(view):
                    view = builder(aten.permute.default, view, [1, 2, 3, 0])
                with self._graph.inserting_after(view):
                    view = builder(aten.squeeze.dim, view, 2)
            self._views[value, dtype] = view
        return self._views[value, dtype]


def _is_fit(node: fx.Node, position: int) -> bool:
    """Whether a convolution, of the images at a position of its arguments, has these operators."""
    images, weight, *_ = arguments_of(node)[position:]
    transposed, _, groups = arguments_of(node)[6 + position :][:3]
    value = images.meta["val"]
    return value.dim() == 4 and has_last(value) and has_kernel(value, weight.meta["val"], transposed, groups)


def has_kernel(images: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: Any) -> bool:
    """Whether there is code for a convolution, and it has enough channels."""
    if images.dtype not in _DTYPES or weight.dtype != images.dtype or convolutions() is None:
        return False
    if images.dtype == torch.bfloat16 and not has_bfloat16_matmuls():
        return False
    if not all(isinstance(size, int) for size in weight.shape) or math.prod(weight.shape[2:]) > MOST_TAPS:
        return False
    if not isinstance(groups, int):
        return False
    outputs, channels = weight.shape[:2]
    if not transposed and is_depthwise(outputs, images.shape[1], groups):
        return outputs >= FEWEST_CHANNELS
    return min(outputs // groups, channels) >= FEWEST_CHANNELS


def _forward(values: _Pixels, builder: NodeBuilder, node: fx.Node) -> fx.Node:
    images, weight, bias, stride, padding, dilation, transposed, _, groups = arguments_of(node)
    result, dtype = node.meta["val"], _read_in(images, weight, images if transposed else node, groups)
    pixels, rows = values.of(images, dtype), values.of_weight(weight, dtype, _is_depthwise(images, weight, groups))
    windows = stride, padding, dilation
    made = images_of(builder, _convolved(builder, pixels, rows, result, windows, groups, transposed), result)
    if bias is not None:
        added = cast(builder, bias, sum_dtype(bias.meta["val"].dtype))
        made = builder(aten.add.Tensor, made, builder.reshape(added, (*bias.meta["val"].shape, 1, 1)))
    return rounded(builder, node, made)


def _read_in(images: fx.Node, weight: fx.Node, small: fx.Node, groups: Any) -> torch.dtype:
    """The dtype in which a convolution and its gradients read images and weight.

    Args:
        images, weight, groups: of the convolution.
        small: the images, or the result or its gradient, that have a pixel for each window.
    """
    dtype, code = images.meta["val"].dtype, convolutions()
    if dtype != torch.bfloat16:
        return dtype
    outputs, channels = weight.meta["val"].shape[:2]
    width = hint_of(small.meta["val"].shape[3])
    has_pairs = code is not None and code.multiplies_bfloat16 and groups == 1 and outputs % 2 == channels % 2 == 0
    # A thread copies lines of pixels to its stack.
    return dtype if has_pairs and width is not None and width * outputs <= _MOST_OF_LINE else torch.float32


def _gradient(values: _Pixels, builder: NodeBuilder, node: fx.Node, number: int, value: torch.Tensor) -> fx.Node:
    """A gradient that a node returns: of the images, the weight or the bias."""
    element = next(user for user in node.users if arguments_of(user)[1] == number)
    return rounded(builder, element, _exact_gradient(values, builder, node, number, value))


def _exact_gradient(values: _Pixels, builder: NodeBuilder, node: fx.Node, number: int, value: torch.Tensor) -> fx.Node:
    grad, images, weight, _, stride, padding, dilation, transposed, _, groups, _ = arguments_of(node)
    dtype, windows = _read_in(images, weight, images if transposed else grad, groups), (stride, padding, dilation)
    of_result = values.of(grad, dtype)
    if number == 0:
        rows = values.of_weight(weight, dtype, _is_depthwise(images, weight, groups))
        return images_of(builder, _convolved(builder, of_result, rows, value, windows, groups, not transposed), value)
    if number == 2:
        return builder(aten.sum.dim_IntList, of_result, [0, 1, 2], dtype=sum_dtype(dtype))
    # A transposed convolution is the gradient of a convolution of its results.
    pair, kernel = (of_result, values.of(images, dtype)), [*weight.meta["val"].shape[2:]]
    pixels = reversed(pair) if transposed else pair
    made = builder(_OF_WEIGHT, *pixels, kernel, *map(list, windows), groups)
    if _is_depthwise(images, weight, groups):
        made = builder(aten.sum.dim_IntList, made, [0])
        gradient = builder(aten.unsqueeze.default, builder(aten.permute.default, made, [2, 0, 1]), 1)
    else:
        gradient = builder(aten.permute.default, _without_gaps(builder, made, kernel, groups), CHANNELS_FIRST)
    return gradient if has_last(value) else contiguous(builder, gradient)


def _is_depthwise(images: fx.Node, weight: fx.Node, groups: int) -> bool:
    return is_depthwise(weight.meta["val"].shape[0], images.meta["val"].shape[1], groups)


def _without_gaps(builder: NodeBuilder, runs: fx.Node, kernel: list[int], groups: int) -> fx.Node:
    """As `weight_gradient_of`."""
    channels = arguments_of(runs)[1].meta["val"].shape[3] // groups
    outputs, count, room = runs.meta["val"].shape
    elements = kernel[0] * kernel[-1] * channels // count
    if elements != room:
        runs = builder(aten.slice.Tensor, runs, 2, 0, elements)
    return builder.reshape(runs, (outputs, kernel[0], kernel[-1], channels))


def _convolved(
    builder: NodeBuilder,
    pixels: fx.Node,
    rows: fx.Node,
    like: Any,
    windows: tuple[Any, ...],
    groups: int,
    is_gradient: bool,
) -> fx.Node:
    """The pixels of images of the shape of a value."""
    size = [builder.size(one) for one in like.shape[2:]]
    return builder(_CONVOLUTION, pixels, rows, size, *([*map(int, pair)] for pair in windows), groups, is_gradient)
