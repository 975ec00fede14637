"""Writes convolutions over time, and their gradients, as those of images of one row.

In:  `convolution(x, weight, bias)` with x [batch, channels, steps] and its `convolution_backward`, for which there is
     machine code
Out: the same of [batch, channels, 1, steps], which the passes after it compute in the order of memory that is faster
Saves half of the time of those of groups of channels, with a normalization and a layer of one step around it (256
     channels in 16 groups, windows of 128 at 4 x 50 steps), and a sixth to a third of most others; dense ones of three
     steps take a tenth less (AMD EPYC, family 25, model 17)
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of
from lit_ort.passes.image_convolutions import has_kernel
from lit_ort.passes.node_builder import NodeBuilder, replace_elements, replace_nodes

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
# The dimension of an image's row.
_ROW = 2


def convolve_over_time(module: fx.GraphModule) -> int:
    """Rewrites convolutions in a graph, in place. Returns their number."""
    images = _Images(module.graph)
    fired = replace_nodes(
        module, lambda node: node.target is _FORWARD and _is_fit(node, 0), functools.partial(_forward, images)
    )
    backwards: dict[fx.Node, fx.Node] = {}
    return fired + replace_elements(
        module,
        lambda node: node.target is _BACKWARD and _is_fit(node, 1),
        functools.partial(_gradient, images, backwards),
    )


class _Images:
    """Values as images of one row, each made once."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._made: dict[fx.Node, fx.Node] = {}

    def of(self, value: fx.Node) -> fx.Node:
        if value not in self._made:
            with self._graph.inserting_after(value):
                self._made[value] = NodeBuilder(self._graph, value.meta)(aten.unsqueeze.default, value, _ROW)
        return self._made[value]


def _is_fit(node: fx.Node, position: int) -> bool:
    images, weight, *_ = arguments_of(node)[position:]
    stride, padding, _, transposed, _, groups = arguments_of(node)[3 + position :][:6]
    value, kernel = images.meta["val"], weight.meta["val"].shape[2:]
    # Windows that don't overlap would be matmuls of copies.
    is_patch = [*kernel] == [*stride] != [1] and {*padding} == {0}
    return value.dim() == 3 and not is_patch and has_kernel(value, weight.meta["val"], transposed, groups)


def _forward(images: _Images, builder: NodeBuilder, node: fx.Node) -> fx.Node:
    value, weight, bias, *settings = arguments_of(node)
    made = builder(_FORWARD, images.of(value), images.of(weight), bias, *_settings(*settings))
    return builder(aten.squeeze.dim, made, _ROW)


def _gradient(
    images: _Images,
    backwards: dict[fx.Node, fx.Node],
    builder: NodeBuilder,
    node: fx.Node,
    number: int,
    value: torch.Tensor,
) -> fx.Node:
    """A gradient that a node returns: of the input, the weight or the bias."""
    if node not in backwards:
        *values, bias_sizes = arguments_of(node)[:4]
        *settings, mask = arguments_of(node)[4:]
        backwards[node] = builder(_BACKWARD, *map(images.of, values), bias_sizes, *_settings(*settings), mask)
    gradient = builder(operator.getitem, backwards[node], number)
    return gradient if number == 2 else builder(aten.squeeze.dim, gradient, _ROW)


def _settings(
    stride: list[int], padding: list[int], dilation: list[int], transposed: bool, added: list[int], groups: int
) -> list[Any]:
    return [[1, *stride], [0, *padding], [1, *dilation], transposed, [0, *added], groups]
