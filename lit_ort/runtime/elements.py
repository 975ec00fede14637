"""Element types, by torch's types and ONNX's numbers of them."""

from __future__ import annotations

import torch

# TensorProto.DataType of the ONNX specification, which is ONNXTensorElementDataType of ONNX Runtime's C interface too.
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
