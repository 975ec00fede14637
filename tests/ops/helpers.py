"""Shared by the tests of operators."""

from __future__ import annotations

import weakref

import torch


class RecordingMemory:
    """Remembers the storages that it handed out."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        # What a kernel forgets to write shows.
        tensor = torch.empty(shape, dtype=dtype).fill_(torch.nan if dtype.is_floating_point else 1)
        self._tensors.append(tensor)
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        storages = {own.untyped_storage().data_ptr() for own in self._tensors}
        return tensor.untyped_storage().data_ptr() in storages


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))


def closeness(actual: torch.Tensor, baseline: torch.Tensor, exact: torch.Tensor) -> float:
    """Error beside that of torch's own computation in the same precision."""
    return relative_error(actual.double(), exact) / max(relative_error(baseline.double(), exact), 1e-12)


def seed_of(number: int) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int64)


class MeasuringMemory:
    """Counts the bytes that are in use at most."""

    def __init__(self) -> None:
        self.peak = self._used = 0

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        size = tensor.numel() * dtype.itemsize
        self._used += size
        self.peak = max(self.peak, self._used)
        weakref.finalize(tensor.untyped_storage(), self._give_back, size)
        return tensor

    def _give_back(self, size: int) -> None:
        self._used -= size
