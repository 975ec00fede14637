"""The symbolic dimensions of a graph's inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from lit_ort._compat.torch_fx import inputs_of
from lit_ort._compat.torch_sizes import memory_order

# By position of the tensor input, the dimensions that change between calls, each with the name of its size.
Dimensions = Mapping[int, Mapping[int, str]]


def changing_strides(module: fx.GraphModule) -> list[int]:
    """The positions of the tensor inputs of which Dynamo made a stride symbolic."""
    strides = [value.stride() for value in _tensor_inputs(module)]
    return [k for k, steps in enumerate(strides) if any(isinstance(step, torch.SymInt) for step in steps)]


def layout_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """What determines the strides for any sizes: the order of the dimensions in memory, None if they are in order.

    The strides themselves, negated to be no order, where elements share memory or have gaps.
    """
    if tensor.is_contiguous():
        return None
    order = memory_order(tensor)
    return tuple(-step - 1 for step in tensor.stride()) if order is None else tuple(order)


def changing_dimensions(module: fx.GraphModule) -> Dimensions:
    """For each tensor input that has some, the dimensions that Dynamo made symbolic. Equal sizes have equal names."""
    shapes = [value.shape for value in _tensor_inputs(module)]
    symbolic = ({k: str(size) for k, size in enumerate(shape) if isinstance(size, torch.SymInt)} for shape in shapes)
    return {position: dimensions for position, dimensions in enumerate(symbolic) if dimensions}


def _tensor_inputs(module: fx.GraphModule) -> list[torch.Tensor]:
    """Dynamo's examples of the tensor inputs."""
    values = [node.meta.get("example_value") for node in inputs_of(module.graph)]
    return [value for value in values if isinstance(value, torch.Tensor)]
