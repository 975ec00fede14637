"""The symbolic dimensions of a graph's inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from lit_ort._compat.torch_fx import inputs_of

# By position of the tensor input, the dimensions that change between calls, each with the name of its size.
Dimensions = Mapping[int, Mapping[int, str]]


def changing_dimensions(module: fx.GraphModule) -> Dimensions:
    """For each tensor input that has some, the dimensions that Dynamo made symbolic. Equal sizes have equal names."""
    values = [node.meta.get("example_value") for node in inputs_of(module.graph)]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    symbolic = ({k: str(size) for k, size in enumerate(shape) if isinstance(size, torch.SymInt)} for shape in shapes)
    return {position: dimensions for position, dimensions in enumerate(symbolic) if dimensions}
