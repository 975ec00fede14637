"""Writes convolutions whose windows don't overlap as matmuls of patches.

In:  `convolution(x, weight, bias)` of images and its `convolution_backward`, with a kernel as large as the stride and
     no padding: patch embeddings, downsampling, 1 x 1 kernels of images with channels last; transposed ones too
Out: the patches as rows, and matmuls with the weight
Saves oneDNN's calls and reorders, and keeps the layers in native sessions. With 1 x 1 kernels, the gradients of images
     and weight take 0.23 ms for 0.40 with 32 and 192 channels of 8 x 8 x 8 pixels, 0.75 for 0.73 with 16 and 96 of
     8 x 32 x 32, 3.3 for 4.1 with 256 and 64 of 16 x 16 x 16 (AMD EPYC, family 25, model 1)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, first_argument
from lit_ort._compat.torch_sizes import inverse_order
from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from lit_ort.passes.node_builder import NodeBuilder, replace_elements, replace_nodes
from lit_ort.passes.pixel_nodes import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    FORMAT,
    contiguous,
    erase_unused_formats,
    has_last,
    images_of,
    pixels_of,
)

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_DTYPES = frozenset({torch.float32, torch.float64})


def multiply_patches(module: fx.GraphModule) -> int:
    """Rewrites convolutions in a graph, in place. Returns their number."""
    fired = replace_nodes(module, lambda node: node.target is _FORWARD and _has_patches(node, 0), _forward)
    make = functools.partial(_gradient, {})
    fired += replace_elements(module, lambda node: node.target is _BACKWARD and _has_patches(node, 1), make)
    erase_unused_formats(module.graph)
    return fired


def _has_patches(node: fx.Node, position: int) -> bool:
    """Whether the windows of a convolution, of the images at a position of its arguments, tile these or its result."""
    images, weight, _, stride, padding, dilation, transposed, added, groups, *_ = arguments_of(node)[position:]
    value, kernel = images.meta["val"], weight.meta["val"].shape[2:]
    if value.dim() != 4 or not _has_matmul(value.dtype) or groups != 1 or {*padding, *added} != {0}:
        return False
    if [*kernel] != [*stride] or {*dilation} != {1}:
        return False
    if [*kernel] == [1, 1]:
        # Pixels of other images would be copied.
        return has_last(value)
    sizes = zip(value.shape[2:], kernel, strict=True)
    return transposed or all(isinstance(size, int) and size % length == 0 for size, length in sizes)


def _has_matmul(dtype: torch.dtype) -> bool:
    return has_bfloat16_matmuls() if dtype == torch.bfloat16 else dtype in _DTYPES


def _forward(builder: NodeBuilder, node: fx.Node) -> fx.Node:
    images, weight, bias, *_, transposed, _, _ = arguments_of(node)
    result = node.meta["val"]
    if transposed:
        patches = builder(aten.mm.default, _rows(builder, images), _matrix(builder, weight, result))
        made = _images(builder, patches, result, weight)
        if bias is None:
            return made
        return builder(aten.add.Tensor, made, builder.reshape(bias, (*bias.meta["val"].shape, 1, 1)))
    images = _unconverted(images, weight)
    matrix = builder(aten.t.default, _matrix(builder, weight, images.meta["val"]))
    patches = _patches(builder, images, weight)
    if bias is None:
        product = builder(aten.mm.default, patches, matrix)
    else:
        product = builder(aten.addmm.default, bias, patches, matrix)
    return _pixels(builder, product, result)


def _gradient(
    rows: dict[fx.Node, fx.Node], builder: NodeBuilder, node: fx.Node, number: int, value: torch.Tensor
) -> fx.Node:
    """A gradient that a node returns: of the images, the weight or the bias.

    Args:
        rows: the pixels of nodes that were copied before, as rows.
        builder, node, number, value: as `replace_elements`.
    """
    grad, images, weight, *_, transposed, _, _, _ = arguments_of(node)
    if transposed and number == 2:
        return builder(aten.sum.dim_IntList, grad, [0, 2, 3])
    if transposed and number == 0:
        matrix = builder(aten.t.default, _matrix(builder, weight, grad.meta["val"]))
        return _pixels(builder, builder(aten.mm.default, _patches(builder, grad, weight), matrix), value)
    large, small = (grad, images) if transposed else (_unconverted(images, weight), grad)
    if small not in rows:
        rows[small] = _rows(builder, small)
    if number == 0:
        product = builder(aten.mm.default, rows[small], _matrix(builder, weight, value))
        return _images(builder, product, value, weight)
    if number == 1:
        columns = builder(aten.t.default, rows[small])
        product = builder(aten.mm.default, columns, _patches(builder, large, weight))
        return _weight(builder, product, value, large.meta["val"])
    return builder(aten.sum.dim_IntList, rows[small], [0])


def _unconverted(images: fx.Node, weight: fx.Node) -> fx.Node:
    """Images before their conversion to channels last, if patches are copied in any case."""
    is_copied = [*weight.meta["val"].shape[2:]] != [1, 1]
    return first_argument(images) if images.target is FORMAT and is_copied else images


def _rows(builder: NodeBuilder, images: fx.Node) -> fx.Node:
    """Pixels as rows, [batch * height * width, channels]."""
    return _merged(builder, pixels_of(builder, images), 3)


def _pixels(builder: NodeBuilder, rows: fx.Node, like: Any) -> fx.Node:
    """Rows as the pixels of images of the shape and the strides of a value."""
    batch, channels, height, width = like.shape
    return images_of(builder, builder.reshape(rows, (batch, height, width, channels)), like)


def _patches(builder: NodeBuilder, images: fx.Node, weight: fx.Node) -> fx.Node:
    """Patches as rows, [batch * rows * columns, elements of a kernel], in the order of memory of the images."""
    shape, order = _tiled(images.meta["val"], weight)
    tiles = builder.reshape(
        builder(aten.permute.default, images, CHANNELS_LAST) if has_last(images.meta["val"]) else images, shape
    )
    return _merged(builder, contiguous(builder, builder(aten.permute.default, tiles, order)), 3)


def _images(builder: NodeBuilder, patches: fx.Node, like: Any, weight: fx.Node) -> fx.Node:
    """Images of the shape and the strides of a value, from patches in the order of its memory."""
    shape, order = _tiled(like, weight)
    tiles = builder.reshape(patches, [shape[dim] for dim in order])
    made = contiguous(builder, builder(aten.permute.default, tiles, inverse_order(order)))
    batch, channels, height, width = like.shape
    if not has_last(like):
        return builder.reshape(made, like.shape)
    return builder(aten.permute.default, builder.reshape(made, (batch, height, width, channels)), CHANNELS_FIRST)


def _tiled(images: Any, weight: fx.Node) -> tuple[list[Any], list[int]]:
    """The shape of images as tiles in their order of memory, and the order of dimensions in which tiles are rows."""
    (batch, channels, height, width), (down, across) = images.shape, weight.meta["val"].shape[2:]
    sizes = [height // down, down, width // across, across]
    if has_last(images):
        return [batch, *sizes, channels], [0, 1, 3, 2, 4, 5]
    return [batch, channels, *sizes], [0, 2, 4, 1, 3, 5]


def _matrix(builder: NodeBuilder, weight: fx.Node, images: Any) -> fx.Node:
    """A weight as [outputs, elements of a kernel] in the order of memory of images."""
    if has_last(images):
        weight = contiguous(builder, builder(aten.permute.default, weight, CHANNELS_LAST))
    return _merged(builder, weight, 1)


def _weight(builder: NodeBuilder, matrix: fx.Node, like: Any, images: Any) -> fx.Node:
    """The gradient of a weight from its matrix in the order of memory of images."""
    outputs, channels, height, width = like.shape
    if not has_last(images):
        return builder.reshape(matrix, like.shape)
    made = builder.reshape(matrix, (outputs, height, width, channels))
    return contiguous(builder, builder(aten.permute.default, made, CHANNELS_FIRST))


def _merged(builder: NodeBuilder, value: fx.Node, dims: int) -> fx.Node:
    """A value as a matrix, of whose dimensions the first `dims` are one, and the others another one."""
    shape: Sequence[Any] = value.meta["val"].shape
    return builder.reshape(value, (math.prod(shape[:dims]), math.prod(shape[dims:])))
