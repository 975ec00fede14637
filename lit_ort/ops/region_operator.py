"""The torch operator by which graphs call regions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lit_ort.ops.operator import define
from lit_ort.regions.element_types import MEMORY_DTYPES
from lit_ort.regions.interpret_region import interpret
from lit_ort.regions.placed_region import PlacedRegion, TensorLayout, from_json, with_sizes


def empty_outputs(placed: PlacedRegion[int]) -> list[torch.Tensor]:
    """Memory for the outputs of a region."""
    dtypes = [MEMORY_DTYPES[dtype] for dtype in placed.region.outputs]
    return [torch.empty(shape, dtype=dtype) for shape, dtype in zip(placed.outputs, dtypes, strict=True)]


def laid_out(tensor: torch.Tensor, layout: TensorLayout[int]) -> torch.Tensor:
    """A tensor with the strides that a region reads it by; a copy if it has others."""
    if layout.strides is None:
        return tensor.contiguous()
    if tensor.stride() == layout.strides:
        return tensor
    return torch.empty_strided(layout.shape, layout.strides, dtype=tensor.dtype).copy_(tensor)


def _interpreted(tensors: Sequence[torch.Tensor], region: str, sizes: Sequence[int]) -> list[torch.Tensor]:
    placed = with_sizes(from_json(region), sizes)
    outputs = empty_outputs(placed)
    given = [laid_out(tensor, layout) for tensor, layout in zip(tensors, placed.inputs, strict=True)]
    interpret(placed.region, placed.run, given, outputs)
    return outputs


def _fake(tensors: Sequence[torch.Tensor], region: str, sizes: Sequence[int]) -> list[torch.Tensor]:
    return empty_outputs(with_sizes(from_json(region), sizes))


# Sessions replace this operator by machine code.
REGION = define(
    "region(Tensor[] tensors, str region, SymInt[] sizes) -> Tensor[]",
    lambda _, *args: _interpreted(*args),
    _fake,
    _interpreted,
)
REGION_NAME = str(REGION)
