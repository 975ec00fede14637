"""torch's memory for every value of a session, so that what torch nodes return is not copied.

A torch node offers its result while ONNX Runtime asks for memory for the node's output, and the result's own memory
becomes the output's. Everything else lies in the pool that torch nodes take theirs from.

ONNX Runtime takes all of it for the CPU's. What lies on another device is an address to it, which it hands from one
torch node to the next and never looks at: models for such devices have no other nodes.
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
from lit_ort.runtime.engines.serving import current_state
from lit_ort.runtime.engines.stock.library import Library

# What ONNX Runtime asks for is rounded up, and no more than the value's bytes of it are used.
_ROUNDING = 256
# Of the struct OrtAllocator: all that later versions added is optional.
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


class TorchMemory:
    """The allocator of a process's sessions, for those with the setting `session.use_env_allocators`.

    Args:
        library: ONNX Runtime.
        environment: an OrtEnv, which keeps the allocator until the process ends.
    """

    def __init__(self, library: Library, environment: int) -> None:
        # By address: the tensor in whose memory a value lies, and the run that it belongs to.
        self._live: dict[int, tuple[torch.Tensor, Any]] = {}
        self._offered = threading.local()
        # For what no run asks for, such as a session's constants, or memory of a kernel's other threads.
        self._pool = BufferPool()
        self.info = info = library.new("CreateCpuMemoryInfo", 0, 0)
        self._functions = (
            ctypes.CFUNCTYPE(c_void_p, c_void_p, c_size_t)(self._allocate),
            ctypes.CFUNCTYPE(None, c_void_p, c_void_p)(self._free),
            ctypes.CFUNCTYPE(c_void_p, c_void_p)(lambda this: info),
        )
        allocate, free, told = (ctypes.cast(function, c_void_p) for function in self._functions)
        self._struct = _Allocator(_ALLOCATOR_VERSION, allocate, free, told, allocate)
        library.call("RegisterAllocator", environment, ctypes.byref(self._struct))

    @contextmanager
    def offering(self, result: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Gives a result's memory to the next value of its size that this thread makes; yields what was offered.

        ONNX Runtime may write to the memory of values that it needs no more, so nothing else may lie in it: of a result
        on another device, which it can't copy, a copy is offered then.
        """
        alone = result.data_ptr() not in self._live and owners_of_memory(result) == 1
        offered = None
        if alone and result.numel() and result.is_contiguous():
            offered = result
        elif not is_cpu(result.device):
            offered = result.clone(memory_format=torch.contiguous_format)
        self._offered.tensor = offered
        try:
            yield offered
        finally:
            self._offered.tensor = None

    def tensor_at(self, address: int, run: Any) -> torch.Tensor | None:
        """The tensor whose memory a value lies in; None for a value that the run didn't make."""
        tensor, owner = self._live.get(address, (None, None))
        return tensor if owner is run else None

    def device_at(self, address: int) -> torch.device:
        """The device on which a value lies; the CPU for an input or a constant, which the allocator has not made."""
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
    """So many bytes, or the end of the process with a message.

    Nothing can be raised through ONNX Runtime's C, whose kernels write to the address that they get, null too.
    """
    try:
        return pool.empty(size, dtype=torch.uint8)
    except (MemoryError, RuntimeError) as error:
        os.write(_STDERR, f"\nlit_ort: {error}\nStock onnxruntime can't go on without: the process ends.\n".encode())
        os.abort()
