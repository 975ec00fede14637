"""Helpers for the tests of operators."""

from __future__ import annotations

import weakref

import torch


class RecordingAllocator:
    """Records the tensors that it has allocated."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        # Makes elements that a kernel doesn't write visible.
        tensor = torch.empty(shape, dtype=dtype).fill_(torch.nan if dtype.is_floating_point else 1)
        self._tensors.append(tensor)
        return tensor

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor uses memory that was allocated here."""
        storages = {allocated.untyped_storage().data_ptr() for allocated in self._tensors}
        return tensor.untyped_storage().data_ptr() in storages


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))


def closeness(actual: torch.Tensor, baseline: torch.Tensor, exact: torch.Tensor) -> float:
    """The error relative to that of torch's computation in the same precision."""
    return relative_error(actual.double(), exact) / max(relative_error(baseline.double(), exact), 1e-12)


def seed_of(number: int) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int64)


class MeasuringAllocator:
    """Measures the largest number of bytes in use at the same time."""

    def __init__(self) -> None:
        self.peak = self._used = 0

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        size = tensor.numel() * dtype.itemsize
        self._used += size
        self.peak = max(self.peak, self._used)
        weakref.finalize(tensor.untyped_storage(), self._free, size)
        return tensor

    def _free(self, size: int) -> None:
        self._used -= size
