"""Which sizes of a graph's inputs Dynamo left symbolic."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from lit_ort._compat.torch_fx import inputs_of

# For each tensor input, which of its dimensions change.
Dimensions = Mapping[int, tuple[int, ...]]


def changing_dimensions(module: fx.GraphModule) -> Dimensions:
    """For each tensor input, which of its dimensions Dynamo left symbolic."""
    values = [node.meta.get("example_value") for node in inputs_of(module.graph)]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    found = (tuple(k for k, size in enumerate(shape) if isinstance(size, torch.SymInt)) for shape in shapes)
    return {position: symbolic for position, symbolic in enumerate(found) if symbolic}
