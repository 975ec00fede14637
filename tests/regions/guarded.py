"""Tensors between pages that can't be read or written: a load or store outside of them ends the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE


class Guarded:
    """Memory with a guard page before and after it; it must outlive the tensors in it."""

    def __init__(self, size: int) -> None:
        pages = -(-size // PAGE) + 2
        self._map = mmap.mmap(-1, pages * PAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for guard in (0, pages - 1):
            assert _LIBC.mprotect(self._start + guard * PAGE, PAGE, 0) == 0
        self.low, self.high = self._start + PAGE, self._start + (pages - 1) * PAGE

    def tensor(self, like: torch.Tensor, *, at_end: bool) -> torch.Tensor:
        """A copy of a tensor of one dimension at the end, or at the start, of the memory."""
        size = like.nbytes
        if not size:
            return like.clone()
        buffer = (ctypes.c_char * size).from_address(self.high - size if at_end else self.low)
        return torch.frombuffer(buffer, dtype=like.dtype).copy_(like)


def guarded(tensors: Sequence[torch.Tensor], *, at_end: bool) -> tuple[list[torch.Tensor], list[Guarded]]:
    """Copies of tensors, each between guard pages."""
    memory = [Guarded(tensor.nbytes) for tensor in tensors]
    return [place.tensor(tensor, at_end=at_end) for place, tensor in zip(memory, tensors, strict=True)], memory
