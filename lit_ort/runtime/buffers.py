"""Memory for what torch kernels return to a graph, kept between steps as ONNX Runtime's arena keeps its own.

A fresh large allocation costs a page fault for every 4 KiB of it, which for a logits tensor can take longer than the
product that fills it. One region serves all sizes: a gradient takes the place of the activations that it was computed
from.
"""

from __future__ import annotations

import bisect
import collections
import math
import mmap
import threading
import weakref

import numpy as np
import torch

# Address space that is reserved at once; memory is taken when it is first written to.
SEGMENT_BYTES = 2**30
ALIGNMENT = 64
# Tensors below this size come from torch's allocator, whose heap reuses them without page faults and in less time.
SMALL_BYTES = 2**20
# What memory of NumPy's is made of, by the bytes of an element, so that a tensor of any type lies in it.
_ELEMENTS = {1: np.int8, 2: np.int16, 4: np.float32, 8: np.int64, 16: np.complex128}


class BufferPool:
    """Hands out tensors in memory that is no longer in use. Safe to use from several threads.

    Args:
        small_bytes: the size below which torch's own allocator serves.
    """

    def __init__(self, small_bytes: int = SMALL_BYTES) -> None:
        self._small_bytes = max(1, small_bytes)
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor; its memory returns to the pool when the last reference to it goes."""
        wanted = math.prod(shape) * dtype.itemsize
        if wanted < self._small_bytes:
            return torch.empty(shape, dtype=dtype)
        size = -(-wanted // ALIGNMENT) * ALIGNMENT
        with self._lock:
            memory = self._take(size, shape, _ELEMENTS[dtype.itemsize])
        tensor = torch.from_numpy(memory)
        return tensor if tensor.dtype == dtype else tensor.view(dtype)

    def cast(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`data` in another type; itself where it has it."""
        return data if data.dtype == dtype else self.empty(*data.shape, dtype=dtype).copy_(data)

    @property
    def reserved_bytes(self) -> int:
        """The memory that was in use at most, summed over segments: what the process keeps."""
        return sum(segment.highest for segment in self._segments)

    def trim(self) -> None:
        """Gives the memory that nobody holds back to the system; its next use takes it anew, page by page."""
        with self._lock:
            for segment in self._segments:
                segment.trim()

    def _take(self, size: int, shape: tuple[int, ...], element: type[np.generic]) -> np.ndarray:
        for segment in self._segments:
            memory = segment.take(size, shape, element)
            if memory is not None:
                return memory
        segment = _reserved(size)
        self._segments.append(segment)
        memory = segment.take(size, shape, element)
        assert memory is not None
        return memory


def _reserved(size: int) -> _Segment:
    """A new segment; no larger than it has to be where address space is limited.

    Raises:
        MemoryError: there are no `size` bytes.
    """
    try:
        return _Segment(max(size, SEGMENT_BYTES))
    except OSError:
        try:
            return _Segment(size)
        except OSError as error:
            raise MemoryError(
                f"{size} bytes for one value can't be had: {error.strerror or error}. Take a smaller batch; "
                "lit_ort.plan_memory tells what a step takes."
            ) from error


class _Segment:
    """Contiguous address space, divided into taken and free blocks; neighbouring free ones are one.

    A request gets the smallest free block that holds it (best fit, Knuth, TAOCP 1, 2.5).
    """

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, size, flags=flags)
        self.highest = 0
        # Free blocks by address: where each starts and how long it is.
        self._starts = [0]
        self._sizes = [size]
        self._taken: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}
        # Appending is all that a callback does: it can come at any moment, also while this thread holds the lock.
        self._returned: collections.deque[int] = collections.deque()

    def take(self, size: int, shape: tuple[int, ...], element: type[np.generic]) -> np.ndarray | None:
        """An array in `size` bytes, its own while anyone holds it, or None where no free block is long enough."""
        self._collect()
        length = min((length for length in self._sizes if length >= size), default=0)
        if not length:
            return None
        k = self._sizes.index(length)
        start = self._starts[k]
        if length == size:
            del self._starts[k], self._sizes[k]
        else:
            self._starts[k], self._sizes[k] = start + size, length - size
        self.highest = max(self.highest, start + size)
        memory = np.ndarray(shape, element, self._memory, start)
        returned = self._returned
        self._taken[start] = (weakref.ref(memory, lambda _: returned.append(start)), size)
        return memory

    def trim(self) -> None:
        self._collect()
        if not hasattr(self._memory, "madvise"):
            return
        for start, size in zip(self._starts, self._sizes, strict=True):
            # Pages that lie in the block as a whole, up to where memory was ever in use.
            first, end = -(-start // mmap.PAGESIZE), min(start + size, self.highest) // mmap.PAGESIZE
            if first < end:
                self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)

    def _collect(self) -> None:
        while self._returned:
            self._give_back(self._returned.popleft())

    def _give_back(self, start: int) -> None:
        _, size = self._taken.pop(start)
        k = bisect.bisect(self._starts, start)
        if k < len(self._starts) and self._starts[k] == start + size:
            size += self._sizes[k]
            del self._starts[k], self._sizes[k]
        if k > 0 and self._starts[k - 1] + self._sizes[k - 1] == start:
            self._sizes[k - 1] += size
        else:
            self._starts.insert(k, start)
            self._sizes.insert(k, size)
