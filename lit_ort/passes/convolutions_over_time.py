"""Writes convolutions over time as those of images of one row, which they are for torch's kernels too.

In:  `convolution(x, weight, bias)` of steps, [batch, channels, length], and its `convolution_backward`
Out: the same operators of [batch, channels, 1, length], between views
Saves nothing alone: passes for images choose the memory format of convolutions over time too, and how to compute them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, is_element, strides_of
from lit_ort.passes.node_builder import NodeBuilder, replace_nodes

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
# The dimension of a row's height.
_HEIGHT = 2


def add_rows(module: fx.GraphModule) -> int:
    """Rewrites convolutions in a graph, in place. Returns their number."""
    graph = module.graph
    fired = replace_nodes(module, lambda node: node.target is _FORWARD and _is_over_time(node, 0), _forward)
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        if _is_over_time(node, 1) and all(map(is_element, node.users)):
            with graph.inserting_before(node):
                _replace_elements(node, NodeBuilder(graph, node.meta))
            graph.erase_node(node)
            fired += 1
    return fired


def _is_over_time(node: fx.Node, position: int) -> bool:
    return arguments_of(node)[position].meta["val"].dim() == 3


def _forward(builder: NodeBuilder, node: fx.Node) -> fx.Node:
    images, weight, bias, *rest = arguments_of(node)
    result = builder(_FORWARD, _row(builder, images), _row(builder, weight), bias, *_of_rows(rest))
    return _like(builder, builder(aten.squeeze.dim, result, _HEIGHT), node)


def _replace_elements(node: fx.Node, builder: NodeBuilder) -> None:
    """Replaces the gradients that a node returns."""
    *tensors, bias_sizes = arguments_of(node)[:4]
    *settings, mask = arguments_of(node)[4:]
    made = builder(_BACKWARD, *(_row(builder, one) for one in tensors), bias_sizes, *_of_rows(settings), mask)
    for element in list(node.users):
        number = arguments_of(element)[1]
        gradient = builder(element.target, made, number)
        if number < 2:
            gradient = _like(builder, builder(aten.squeeze.dim, gradient, _HEIGHT), element)
        element.replace_all_uses_with(gradient)
        node.graph.erase_node(element)


def _like(builder: NodeBuilder, made: fx.Node, node: fx.Node) -> fx.Node:
    """A value with the strides of a node: those of steps whose channels are adjacent would be other ones."""
    if strides_of(made.meta["val"]) == strides_of(node.meta["val"]):
        return made
    return builder(aten.clone.default, made, memory_format=torch.contiguous_format)


def _row(builder: NodeBuilder, steps: fx.Node) -> fx.Node:
    return builder(aten.unsqueeze.default, steps, _HEIGHT)


def _of_rows(settings: list[Any]) -> list[Any]:
    """Stride, padding, dilation, transposed, output padding and groups."""
    stride, padding, dilation, transposed, added, groups = settings
    return [[1, *stride], [0, *padding], [1, *dilation], transposed, [0, *added], groups]
