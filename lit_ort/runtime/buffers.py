"""Memory for what torch kernels return to a graph, kept between steps as ONNX Runtime's arena keeps its own.

A fresh large allocation costs a page fault for every 4 KiB of it, which for a logits tensor can take longer than the
product that fills it.
"""

from __future__ import annotations

import math
import threading

import torch

# A buffer serves requests down to this share of its size; below, most of it would lie idle.
SMALLEST_SHARE = 0.5
MOST_IDLE = 32
# What buffers are counted in.
BUFFER_TYPE = torch.float32


class BufferPool:
    """Hands out tensors over buffers that nobody else holds any more. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor; its memory returns to the pool when the last reference to it goes."""
        wanted = math.prod(shape)
        elements = -(-wanted * dtype.itemsize // BUFFER_TYPE.itemsize)
        with self._lock:
            free = [buffer for buffer in self._buffers if buffer.is_free()]
            fitting = [b for b in free if elements <= b.elements <= max(elements / SMALLEST_SHARE, 1)]
            if fitting:
                buffer = min(fitting, key=lambda b: b.elements)
            else:
                self._drop(free[: max(0, len(free) - MOST_IDLE)])
                buffer = _Buffer(elements)
                self._buffers.append(buffer)
            # Made under the lock: the view is what marks the buffer as taken.
            return buffer.flat[:elements].view(dtype)[:wanted].view(shape)

    def _drop(self, idle: list[_Buffer]) -> None:
        self._buffers = [buffer for buffer in self._buffers if buffer not in idle]


class _Buffer:
    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.flat = torch.empty(elements, dtype=BUFFER_TYPE)
        self._storage = self.flat.untyped_storage()
        self._alone = self._references()

    def is_free(self) -> bool:
        return self._references() == self._alone

    def _references(self) -> int:
        # Counts the tensors over this memory, also those that only ONNX Runtime holds through DLPack.
        return torch._C._storage_Use_Count(self._storage._cdata)
