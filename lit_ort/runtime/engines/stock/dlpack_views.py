"""torch tensors over ONNX Runtime's memory, which they don't own, through DLPack (dlpack.h, DLManagedTensor)."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

import torch

from lit_ort._compat.devices import CPU
from lit_ort._compat.torch import from_dlpack
from lit_ort.runtime.elements import DTYPES

MOST_DIMENSIONS = 16
# DLPack's device types: kDLCPU and kDLCUDA.
_DEVICES = {CPU.type: 1, "cuda": 2}
# DLPack's type codes; a boolean is a byte here, as torch nodes receive it.
_SIGNED, _UNSIGNED, _FLOAT, _BFLOAT = 0, 1, 2, 4
_FRESH = b"dltensor"
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))


class _ManagedTensor(ctypes.Structure):
    """The C struct. Its deleter stays null, since the tensor doesn't own the memory."""

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
    """A reusable DLPack struct that presents memory as a tensor.

    Args:
        element: the element type, as a number of ONNX.

    Attributes:
        data, shape: the addresses of the struct's fields, for functions that write to them.
    """

    __slots__ = ("_address", "_struct", "data", "shape")

    def __init__(self, element: int) -> None:
        self._struct = _ManagedTensor(dtype=_dlpack_type(DTYPES[element]))
        self._address = ctypes.addressof(self._struct)
        self.data = self._address + _ManagedTensor.data.offset
        self.shape = self._address + _ManagedTensor.shape.offset

    def set_shape(self, shape: Any) -> None:
        """Reads the shape from an array of int64, which the caller must keep alive."""
        self._struct.shape = ctypes.addressof(shape)

    def set_device(self, device: torch.device) -> None:
        """Sets the device of the memory at `data`."""
        self._struct.device_type, self._struct.device_id = _DEVICES[device.type], device.index or 0

    def address_of_data(self) -> int:
        return self._struct.data

    def tensor(self, rank: int) -> torch.Tensor:
        """The tensor at `data` with the sizes at `shape`; both must be written before."""
        self._struct.rank = rank
        return from_dlpack(_new_capsule(self._address, _FRESH, None))


class Windows:
    """Windows that are reused and never freed.

    torch reads a window's struct again when it frees the tensor, and the traceback of an error can keep the tensor
    alive for longer than the session.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Window]] = {}

    def take(self, element: int) -> Window:
        free = self._free.get(element)
        window = free.pop() if free else Window(element)
        window.set_device(CPU)
        return window

    def give_back(self, element: int, window: Window) -> None:
        self._free.setdefault(element, []).append(window)


def _dlpack_type(dtype: torch.dtype) -> int:
    """DLPack's code, bits and lanes as one little-endian number."""
    if dtype == torch.bfloat16:
        code = _BFLOAT
    elif dtype.is_floating_point:
        code = _FLOAT
    else:
        code = _UNSIGNED if dtype in (torch.uint8, torch.bool) else _SIGNED
    return code | dtype.itemsize * 8 << 8 | 1 << 16
