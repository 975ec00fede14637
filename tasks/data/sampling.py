"""The order of a training set: another one in every epoch, the same one after a resume."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """Every index once, in an order that follows from seed and epoch alone.

    Lightning calls `set_epoch` at the start of each epoch, also of a resumed one.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(hash((self._seed, self._epoch)) & (2**63 - 1))
        return iter(torch.randperm(self._size, generator=generator).tolist())
