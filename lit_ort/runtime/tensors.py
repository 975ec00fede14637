"""torch memory in, ONNX Runtime memory out, through DLPack and without copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lit_ort._compat.onnxruntime import C
from lit_ort._compat.torch import from_dlpack, to_dlpack


def to_ort(tensors: Iterable[torch.Tensor]) -> Any:
    """Wraps CPU tensors; only a non-contiguous one is copied. The values borrow the tensors' memory."""
    values = C.OrtValueVector()
    for tensor in tensors:
        data = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        is_bool = data.dtype == torch.bool
        # ONNX Runtime knows booleans as bytes with a flag beside them.
        values.push_back(to_dlpack(data.view(torch.uint8) if is_bool else data), is_bool)
    return values


def to_torch(values: Any) -> list[torch.Tensor]:
    """Tensors over the values' memory, which goes back to ONNX Runtime's arena with the last tensor."""
    if len(values) == 0:
        return []
    tensors = list(values.to_dlpacks(from_dlpack))
    for position in values.bool_tensor_indices():
        tensors[position] = tensors[position].view(torch.bool)
    return tensors
