"""An allocator that provides torch's memory for every value of a session, so that results of torch nodes aren't copied.

A torch node offers its result while ONNX Runtime requests memory for the node's output, and the result's memory becomes
the output's. All other values are allocated in the pool that torch nodes use too.

ONNX Runtime treats all of this memory as CPU memory. For values on another device it only passes addresses from one
torch node to the next and never reads the memory: models for such devices have no other nodes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_size_t, c_uint32, c_void_p
from typing import Any

import torch

from lit_ort._compat.devices import CPU, is_cpu
from lit_ort._compat.torch import owners_of_memory
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.engines.node_callbacks import current_state
from lit_ort.runtime.engines.stock.library import Library

# ONNX Runtime rounds its requests up, and uses only the value's bytes of the memory.
_ROUNDING = 256
# The version of the struct OrtAllocator; everything that later versions added is optional.
_ALLOCATOR_VERSION = 18
_STDERR = 2


class _Allocator(ctypes.Structure):
    _fields_ = [
        ("version", c_uint32),
        ("Alloc", c_void_p),
        ("Free", c_void_p),
        ("Info", c_void_p),
        ("Reserve", c_void_p),
    ]


class SessionAllocator:
    """The allocator of all sessions of the process that have the setting `session.use_env_allocators`.

    Args:
        library: ONNX Runtime's library.
        environment: an OrtEnv, which keeps the allocator until the process ends.

    Attributes:
        info: the OrtMemoryInfo of the memory.
    """

    def __init__(self, library: Library, environment: int) -> None:
        # By address: the tensor that owns the memory of a value, and the value's run.
        self._live: dict[int, tuple[torch.Tensor, Any]] = {}
        self._offered = threading.local()
        # For requests outside of a run's thread, such as a session's constants, or those of a kernel's other threads.
        self._pool = BufferPool()
        self.info = info = library.new("CreateCpuMemoryInfo", 0, 0)
        self._functions = (
            ctypes.CFUNCTYPE(c_void_p, c_void_p, c_size_t)(self._allocate),
            ctypes.CFUNCTYPE(None, c_void_p, c_void_p)(self._free),
            ctypes.CFUNCTYPE(c_void_p, c_void_p)(lambda this: info),
        )
        allocate, free, get_info = (ctypes.cast(function, c_void_p) for function in self._functions)
        self._struct = _Allocator(_ALLOCATOR_VERSION, allocate, free, get_info, allocate)
        library.call("RegisterAllocator", environment, ctypes.byref(self._struct))

    @contextmanager
    def offering(self, result: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Offers a result's memory to this thread's next allocation of its size; yields the offered tensor.

        ONNX Runtime can overwrite the memory of values that it no longer needs, so only memory without other owners is
        offered. Otherwise nothing is offered, except for a result on another device, which ONNX Runtime can't copy: a
        copy is offered instead.
        """
        is_unshared = result.data_ptr() not in self._live and owners_of_memory(result) == 1
        offered = None
        if is_unshared and result.numel() and result.is_contiguous():
            offered = result
        elif not is_cpu(result.device):
            offered = result.clone(memory_format=torch.contiguous_format)
        self._offered.tensor = offered
        try:
            yield offered
        finally:
            self._offered.tensor = None

    def tensor_at(self, address: int, run: Any) -> torch.Tensor | None:
        """The tensor that owns the memory of a value; None for a value that the run didn't allocate."""
        tensor, owner = self._live.get(address, (None, None))
        return tensor if owner is run else None

    def device_at(self, address: int) -> torch.device:
        """The device of a value; the CPU for an input or a constant, which this allocator didn't allocate."""
        tensor, _ = self._live.get(address, (None, None))
        return CPU if tensor is None else tensor.device

    def _allocate(self, this: int, size: int) -> int:
        state = current_state()
        tensor = getattr(self._offered, "tensor", None)
        if tensor is not None and 0 <= size - tensor.nbytes < _ROUNDING:
            self._offered.tensor = None
        else:
            tensor = _empty(self._pool if state is None else state.pool, size)
        address = tensor.data_ptr()
        self._live[address] = tensor, state
        return address

    def _free(self, this: int, address: int | None) -> None:
        if address:
            del self._live[address]


def _empty(pool: BufferPool, size: int) -> torch.Tensor:
    """Allocates `size` bytes, or ends the process with a message.

    No error can be raised through ONNX Runtime's C code, and its kernels write to the returned address even if it is
    null.
    """
    try:
        return pool.empty(size, dtype=torch.uint8)
    except (MemoryError, RuntimeError) as error:
        message = f"\nlit_ort: {error}\nStock onnxruntime can't report failed allocations: the process ends.\n"
        os.write(_STDERR, message.encode())
        os.abort()
