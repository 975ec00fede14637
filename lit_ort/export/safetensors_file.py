"""Tensors in the safetensors format: the size of a JSON header in eight bytes, the header, and the data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from lit_ort.errors import ExportError

_CODES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header, parts, end = {}, [], 0
    for name, tensor in tensors.items():
        # As bytes of at least one dimension; a view as bytes needs one.
        parts.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        offsets = [end, end + len(parts[-1])]
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join((len(text).to_bytes(8, "little"), text, *parts)))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file.

    Raises:
        ExportError: the file doesn't exist, or is not in the format.
    """
    if not path.is_file():
        raise ExportError(f"{path} does not exist. Pass a folder of export_training, or its parameters.safetensors.")
    data = bytearray(path.read_bytes())
    types = {code: dtype for dtype, code in _CODES.items()}
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    try:
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                dtype, shape = types[entry["dtype"]], entry["shape"]
                begin, count = start + entry["data_offsets"][0], math.prod(shape)
                flat = torch.frombuffer(data, dtype=dtype, count=count, offset=begin) if count else torch.empty(0)
                tensors[name] = flat.to(dtype).reshape(shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{path} is not a safetensors file: {error}. Pass a file that a loop wrote.") from error
    return tensors
