"""Dtypes of regions, by torch's names: those in memory, and those that are computed in."""

from __future__ import annotations

import torch

from lit_ort.regions.symbolic_size import Size

MEMORY_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in MEMORY_DTYPES.items()}
_HALVES = ("bfloat16", "float16")


def name_of(dtype: torch.dtype) -> str | None:
    """The name of a dtype; None if regions don't support it."""
    return _NAMES.get(dtype)


def computed_in(dtype: str) -> str:
    """The dtype that values of a dtype in memory are computed in: float32 for the 16-bit floats."""
    return "float32" if dtype in _HALVES else dtype


def stored(number: float | Size, dtype: str) -> float | Size:
    """A number as an element of a dtype has it in memory; a size as it is."""
    if isinstance(number, Size):
        return number
    if isinstance(number, float):
        # Beyond the largest number it is infinite.
        return torch.tensor(number, dtype=torch.float64).to(MEMORY_DTYPES[dtype]).item()
    return torch.full((), number, dtype=MEMORY_DTYPES[dtype]).item()


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def size_of(dtype: str) -> int:
    """The bytes of an element in memory."""
    return MEMORY_DTYPES[dtype].itemsize
