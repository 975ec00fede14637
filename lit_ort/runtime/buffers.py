"""A memory pool for the results of torch kernels, kept between steps as ONNX Runtime's arena keeps its memory.

A large new allocation costs a page fault for every 4 KiB, which for a logits tensor can take longer than the matrix
matmul that fills it. Tensors of all sizes share one segment, so that a gradient can reuse the memory of the
activations that it was computed from.
"""

from __future__ import annotations

import bisect
import collections
import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch

# Address space that is reserved at once; the system allocates memory when it is first written to.
SEGMENT_BYTES = 2**30
ALIGNMENT = 64
# Tensors below this size come from torch's allocator, which reuses their memory without page faults and is faster.
SMALL_BYTES = 2**20
# NumPy dtypes by item size, so that memory for a tensor of any dtype can be a NumPy array.
_ELEMENTS = {1: np.int8, 2: np.int16, 4: np.float32, 8: np.int64, 16: np.complex128}


def tensor_in(memory: np.ndarray, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a part of memory, which stays in use while the tensor is referenced.

    Args:
        memory: bytes.
        offset: of the tensor's first byte.
        shape, dtype: of the tensor.
    """
    return _tensor_of(np.ndarray(shape, _ELEMENTS[dtype.itemsize], memory, offset), dtype)


def _tensor_of(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


class BufferPool:
    """Allocates tensors in memory that is no longer in use. Thread-safe.

    Args:
        small_bytes: tensors below this size come from torch's own allocator.
    """

    def __init__(self, small_bytes: int = SMALL_BYTES) -> None:
        self._small_bytes = max(1, small_bytes)
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialized tensor; its memory returns to the pool when the last reference to it is dropped."""
        tensor_bytes = math.prod(shape) * dtype.itemsize
        if tensor_bytes < self._small_bytes:
            return torch.empty(shape, dtype=dtype)
        size = -(-tensor_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            memory = self._take(size, shape, _ELEMENTS[dtype.itemsize])
        return _tensor_of(memory, dtype)

    @property
    def reserved_bytes(self) -> int:
        """The memory that the process keeps: the peak use of each segment, summed."""
        return sum(segment.highest for segment in self._segments)

    def trim(self) -> None:
        """Return unused memory to the system; it is allocated again, page by page, at its next use."""
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
    """A new segment; only as large as needed if address space is limited.

    Raises:
        MemoryError: `size` bytes can't be allocated.
    """
    try:
        return _Segment(max(size, SEGMENT_BYTES))
    except OSError:
        try:
            return _Segment(size)
        except OSError as error:
            raise MemoryError(
                f"{size} bytes for one value can't be allocated: {error.strerror or error}. Use a smaller batch; "
                "lit_ort.plan_memory computes the memory of a step."
            ) from error


class _Block(weakref.ref[np.ndarray]):
    """A used block. Its callback has to be a function in C: a signal's error in one of Python's would be lost."""

    __slots__ = ("size", "start")
    start: int
    size: int


class _Segment:
    """Contiguous address space, divided into used and free blocks; adjacent free blocks are merged.

    A request receives the smallest free block that is large enough (best fit, Knuth, TAOCP 1, 2.5).
    """

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, size, flags=flags)
        self.highest = 0
        # The start and the size of each free block, ordered by address.
        self._starts = [0]
        self._sizes = [size]
        self._used: dict[int, _Block] = {}
        # A weakref callback only appends here: it can run at any moment, also while this thread holds the lock.
        self._returned: collections.deque[_Block] = collections.deque()

    def take(self, size: int, shape: tuple[int, ...], element: type[np.generic]) -> np.ndarray | None:
        """An array in a block of `size` bytes, which stays in use while the array is referenced; None if no free block
        is large enough.
        """
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
        block = self._used[start] = _Block(memory, self._returned.append)
        block.start, block.size = start, size
        return memory

    def trim(self) -> None:
        self._collect()
        if not hasattr(self._memory, "madvise"):
            return
        for start, size in zip(self._starts, self._sizes, strict=True):
            # The pages that lie entirely in the block, below the highest address that was ever in use.
            first, end = -(-start // mmap.PAGESIZE), min(start + size, self.highest) // mmap.PAGESIZE
            if first < end:
                self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)

    def _collect(self) -> None:
        while self._returned:
            self._free(self._returned.popleft())

    def _free(self, block: _Block) -> None:
        start, size = block.start, block.size
        del self._used[start]
        k = bisect.bisect(self._starts, start)
        if k < len(self._starts) and self._starts[k] == start + size:
            size += self._sizes[k]
            del self._starts[k], self._sizes[k]
        if k > 0 and self._starts[k - 1] + self._sizes[k - 1] == start:
            self._sizes[k - 1] += size
        else:
            self._starts.insert(k, start)
            self._sizes.insert(k, size)
