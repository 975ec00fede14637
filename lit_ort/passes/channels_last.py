"""Computes each 2d convolution and the gradient of each interpolation in the memory format in which it is faster.

In:  `convolution(x, weight, ...)` and `convolution_backward(gradient, x, weight, ...)` of images, gradients of
     interpolations
Out: the same operators on `lit_ort.in_memory_format(x, channels_last)`; operators that support both formats keep the
     format of their input
Saves 5 to 50 % of a convolution's time with channels last, and conversions of the format between convolutions; half to
nine tenths of the gradient of an interpolation, which is slow for slices of images too.

The time of oneDNN with channels last, as a fraction of the time with channels first, for forward and backward in
float32 on two cores of an AMD EPYC (family 25): depthwise 0.5 to 0.6; 1 x 1 kernels 0.6 to 0.95; 3 x 3 kernels with at
least 512 output pixels in a batch 0.75 to 1.03, but 1.2 to 2.6 with fewer pixels, where the weight is larger than the
images.
"""

from __future__ import annotations

import torch
from torch import fx

import lit_ort.ops  # noqa: F401 - registers the operator
from lit_ort._compat.interpolation import whole_interpolations
from lit_ort._compat.torch_fx import (
    arguments_of,
    first_argument,
    is_element,
    is_size,
    is_view,
    recomputed_example,
    returned_by,
    strides_of,
)
from lit_ort._compat.torch_ops import BY_STRIDES, is_pointwise
from lit_ort._compat.torch_sizes import has_channels_last, hint_of
from lit_ort.kernels.convolution_arguments import is_depthwise
from lit_ort.passes.image_convolutions import has_kernel
from lit_ort.passes.pixel_nodes import FORMAT

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
# Operators that support inputs in any memory format, besides views and pointwise operators.
_ANY_FORMAT = frozenset(
    {
        *(_FORWARD, _BACKWARD, FORMAT, aten.native_group_norm.default, aten.native_group_norm_backward.default),
        *(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default),
        *(aten.native_batch_norm_backward.default, aten.cat.default, aten.constant_pad_nd.default),
        *(aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
        *(aten.avg_pool2d.default, aten.avg_pool2d_backward.default),
        *(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default),
        *(aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default),
        *(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default),
        *(aten.mean.dim, aten.sum.dim_IntList, aten.sum.default, aten.mean.default, aten._to_copy.default),
        *(aten.slice_backward.default, aten.select_backward.default, aten.native_dropout.default),
        *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
        # Pointwise operators that torch doesn't tag as such.
        *(aten.hardtanh.default, aten.hardtanh_backward.default, aten.leaky_relu_backward.default),
        *(aten.hardswish.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default),
        *(aten.elu_backward.default, aten.softplus_backward.default, aten.mish_backward.default),
        *(aten.rsub.Scalar, aten.rsub.Tensor),
        *(torch.ops.lit_ort.dropout.default, torch.ops.lit_ort.dropout_backward.default),
    }
)
_BILINEAR, _NEAREST = aten.upsample_bilinear2d_backward.default, aten.upsample_nearest2d_backward.default
# With fewer channels, the gradient of an interpolation isn't faster with channels last.
_FEWEST_CHANNELS = 4
# The number of output pixels of a batch from which channels last is faster: for any kernel, and for a 1 x 1 kernel.
LEAST_PIXELS, LEAST_PIXELS_1X1 = 512, 128


def order_channels(module: fx.GraphModule) -> int:
    """Rewrites a graph in place. Returns the number of convolutions with channels last."""
    graph = module.graph
    if any(node.target in BY_STRIDES for node in graph.nodes):
        return 0
    fired = _convert_convolutions(graph)
    if fired or any(node.target is _BILINEAR for node in graph.nodes):
        with whole_interpolations():
            _propagate(graph)
        _erase_conversions_of_nothing(graph)
    return fired


def _convert_convolutions(graph: fx.Graph) -> int:
    convolutions = [node for node in graph.nodes if node.target in (_FORWARD, _BACKWARD) and _is_of_images(node)]
    if not any(map(_prefers_last, convolutions)) or _is_between_sessions(graph, convolutions):
        return 0
    conversions: dict[tuple[fx.Node, bool], fx.Node] = {}
    fired = 0
    for node in convolutions:
        position, channels_last = _position_of_images(node), _prefers_last(node)
        images = arguments_of(node)[position]
        if (images, channels_last) not in conversions:
            conversions[images, channels_last] = _converted(graph, images, channels_last)
        node.update_arg(position, conversions[images, channels_last])
        fired += channels_last
    return fired


def _propagate(graph: fx.Graph) -> None:
    """Updates the examples of nodes after a conversion to their new strides.

    Values are converted back for operators that don't support every memory format.
    """
    changed: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function" or is_size(node):
            continue
        if not _supports_any_format(node):
            for argument in [argument for argument in node.all_input_nodes if argument in changed]:
                if not _is_contiguous(argument):
                    node.replace_input_with(argument, _converted(graph, argument, channels_last=False))
        if _is_slow_interpolation(node):
            images = first_argument(node)
            converted = _converted(graph, images, channels_last=True)
            node.replace_input_with(images, converted)
            changed.add(converted)
        if node.target is FORMAT or any(argument in changed for argument in node.all_input_nodes):
            before = strides_of(node.meta["val"])
            node.meta["val"] = recomputed_example(node)
            if node.target is FORMAT or strides_of(node.meta["val"]) != before:
                changed.add(node)


def _erase_conversions_of_nothing(graph: fx.Graph) -> None:
    """Erases conversions of values that have the format, as what is before them was converted too."""
    for node in graph.find_nodes(op="call_function", target=FORMAT):
        value, channels_last = node.args
        example = value.meta["val"]
        if has_channels_last(example) if channels_last else example.is_contiguous():
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def _supports_any_format(node: fx.Node) -> bool:
    if node.target is aten.native_group_norm.default and first_argument(node).meta["val"].dim() != 4:
        return False
    return node.target in _ANY_FORMAT or is_view(node) or is_element(node) or is_pointwise(node.target)


def _is_slow_interpolation(node: fx.Node) -> bool:
    """Whether a gradient of an interpolation is faster with channels last, the conversion included."""
    if node.target not in (_BILINEAR, _NEAREST):
        return False
    gradient = first_argument(node).meta["val"]
    channels, stride = gradient.shape[1], gradient.stride(1)
    if not isinstance(channels, int) or channels < _FEWEST_CHANNELS or has_channels_last(gradient):
        return False
    # That of nearest neighbours is slow for slices of images with channels last only.
    return node.target is _BILINEAR or (isinstance(stride, int) and stride == 1)


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta["val"]
    return not isinstance(value, torch.Tensor) or value.is_contiguous()


def _converted(graph: fx.Graph, images: fx.Node, channels_last: bool) -> fx.Node:
    with graph.inserting_after(images):
        node = graph.call_function(FORMAT, (images, channels_last))
    node.meta["val"] = recomputed_example(node)
    return node


def _position_of_images(node: fx.Node) -> int:
    return 0 if node.target is _FORWARD else 1


def _is_of_images(node: fx.Node) -> bool:
    value = arguments_of(node)[_position_of_images(node)].meta["val"]
    return value.dim() == 4 and value.is_floating_point()


def _prefers_last(node: fx.Node) -> bool:
    """Whether a convolution is faster with channels last; the result is the same for its forward and backward."""
    position = _position_of_images(node)
    images, weight = (argument.meta["val"] for argument in arguments_of(node)[position : position + 2])
    result = node.meta["val"] if node.target is _FORWARD else first_argument(node).meta["val"]
    transposed, _, groups = arguments_of(node)[6 + position :][:3]
    if has_kernel(images, weight, transposed, groups):
        return True
    if isinstance(groups, int) and is_depthwise(weight.shape[0], images.shape[1], groups):
        return True
    sizes = [hint_of(size) for size in (result.shape[0], *result.shape[2:])]
    if any(size is None for size in sizes):
        return False
    pixels = sizes[0] * sizes[1] * sizes[2]
    return pixels >= (LEAST_PIXELS_1X1 if tuple(weight.shape[2:]) == (1, 1) else LEAST_PIXELS)


def _is_between_sessions(graph: fx.Graph, convolutions: list[fx.Node]) -> bool:
    """Whether memory formats can't be changed, because images pass between two sessions."""
    is_one_direction = len({node.target for node in convolutions}) == 1
    returned = {value for value in returned_by(graph) if isinstance(value, fx.Node)}
    is_saved = any(arguments_of(node)[_position_of_images(node)] in returned for node in convolutions)
    return is_one_direction and (is_saved or convolutions[0].target is _BACKWARD)
