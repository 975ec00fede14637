"""Element types: torch dtypes and their ONNX numbers."""

from __future__ import annotations

import torch

# TensorProto.DataType of the ONNX specification; ONNX Runtime's C interface uses the same numbers
# (ONNXTensorElementDataType).
ELEMENTS: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
DTYPES: dict[int, torch.dtype] = {element: dtype for dtype, element in ELEMENTS.items()}
