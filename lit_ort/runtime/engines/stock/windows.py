"""ONNX Runtime's memory as torch tensors that don't own it, through DLPack (dlpack.h, DLManagedTensor)."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

import torch

from lit_ort._compat.devices import CPU
from lit_ort._compat.torch import from_dlpack
from lit_ort.runtime.elements import DTYPES

MOST_DIMENSIONS = 16
# DLPack's numbers of devices: kDLCPU and kDLCUDA.
_DEVICES = {CPU.type: 1, "cuda": 2}
# DLPack's codes of kinds of types; a truth value is a byte here, as torch nodes take it.
_SIGNED, _UNSIGNED, _FLOAT, _BFLOAT = 0, 1, 2, 4
_FRESH = b"dltensor"
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))


class _ManagedTensor(ctypes.Structure):
    """The deleter stays null: memory is only looked at."""

    _fields_ = [
        ("data", c_uint64),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("rank", c_int32),
        ("dtype", c_uint32),
        ("shape", c_uint64),
        ("strides", c_uint64),
        ("byte_offset", c_uint64),
        ("context", c_uint64),
        ("deleter", c_uint64),
    ]


class Window:
    """Shows memory as a tensor.

    Args:
        element: the type of the memory's elements, as ONNX numbers them.

    Attributes:
        data, shape: addresses of the struct's fields, for functions that write to them.
    """

    __slots__ = ("_address", "_struct", "data", "shape")

    def __init__(self, element: int) -> None:
        self._struct = _ManagedTensor(dtype=_dlpack_type(DTYPES[element]))
        self._address = ctypes.addressof(self._struct)
        self.data = self._address + _ManagedTensor.data.offset
        self.shape = self._address + _ManagedTensor.shape.offset

    def point_to(self, shape: Any) -> None:
        """Takes sizes from an array of int64 that the caller keeps."""
        self._struct.shape = ctypes.addressof(shape)

    def turn_to(self, device: torch.device) -> None:
        """Takes what is at `data` for memory of a device."""
        self._struct.device_type, self._struct.device_id = _DEVICES[device.type], device.index or 0

    def address_of_data(self) -> int:
        return self._struct.data

    def look(self, rank: int) -> torch.Tensor:
        """The tensor at `data` with the sizes at `shape`, which were written to before."""
        self._struct.rank = rank
        return from_dlpack(_new_capsule(self._address, _FRESH, None))


class Windows:
    """Windows that are used again and never freed.

    torch reads a window's struct once more when it drops a tensor, which an error's traceback may hold for longer than
    the session lives.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Window]] = {}

    def take(self, element: int) -> Window:
        free = self._free.get(element)
        window = free.pop() if free else Window(element)
        window.turn_to(CPU)
        return window

    def give_back(self, element: int, window: Window) -> None:
        self._free.setdefault(element, []).append(window)


def _dlpack_type(dtype: torch.dtype) -> int:
    """Code, bits and lanes as one number, as a little-endian machine keeps them."""
    if dtype == torch.bfloat16:
        code = _BFLOAT
    elif dtype.is_floating_point:
        code = _FLOAT
    else:
        code = _UNSIGNED if dtype in (torch.uint8, torch.bool) else _SIGNED
    return code | dtype.itemsize * 8 << 8 | 1 << 16
