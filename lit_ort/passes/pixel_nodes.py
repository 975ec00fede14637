"""Nodes that convert images, [batch, channels, height, width], to pixels, [batch, height, width, channels]."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_sizes import channels_last, inverse_order, is_in_order
from lit_ort.passes.node_builder import NodeBuilder

aten = torch.ops.aten
CHANNELS_LAST = channels_last(4)
CHANNELS_FIRST = inverse_order(CHANNELS_LAST)
# Converts values to channels last, or to contiguous memory.
FORMAT = torch.ops.lit_ort.in_memory_format.default


def pixels_of(builder: NodeBuilder, images: fx.Node) -> fx.Node:
    """The pixels of images, contiguous; a view of images with channels last."""
    return contiguous(builder, builder(aten.permute.default, images, CHANNELS_LAST))


def images_of(builder: NodeBuilder, pixels: fx.Node, like: Any) -> fx.Node:
    """The images of contiguous pixels, with the strides of a value."""
    made = builder(aten.permute.default, pixels, CHANNELS_FIRST)
    return made if has_last(like) else contiguous(builder, made)


def contiguous(builder: NodeBuilder, value: fx.Node) -> fx.Node:
    """A contiguous copy of a value; the value itself if it is contiguous."""
    if is_in_order(value.meta["val"], range(value.meta["val"].dim())):
        return value
    return builder(aten.clone.default, value, memory_format=torch.contiguous_format)


def has_last(images: Any) -> bool:
    """Whether images have channels last."""
    return is_in_order(images, CHANNELS_LAST)


def erase_unused_formats(graph: fx.Graph) -> None:
    """Erases conversions that nothing reads any more."""
    for node in reversed(graph.find_nodes(op="call_function", target=FORMAT)):
        if not node.users:
            graph.erase_node(node)
