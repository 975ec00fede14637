"""Random masks: numbers of 16 bits, four from each draw of a fast generator, compared with the share to drop.

A mask takes a tenth of the time of as many Bernoulli draws of torch's. Its seed comes from the generator that sessions
draw from, so that seeds and resumed runs repeat it.

Source: the generator is SFC64 (Doty-Humphrey, PractRand), as NumPy has it.
"""

from __future__ import annotations

import numpy as np
import torch

LEVELS = 2**16
# The seeds of masks are below this.
SEEDS = 2**63 - 1


class Draws:
    """Independent numbers, uniform over int16, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.SFC64(seed))

    def take(self, count: int) -> torch.Tensor:
        """The next `count` numbers, int16[count]."""
        drawn = self._generator.integers(0, 2**64, -(-count // 4), dtype=np.uint64)
        return torch.from_numpy(drawn.view(np.int16))[:count]


def smallest_kept(share: float) -> int:
    """Of numbers uniform over int16, those from this one on are kept where `share`, rounded to `LEVELS`, is dropped."""
    return _dropped_levels(share) - LEVELS // 2


def scale_of(share: float) -> float:
    """What the kept elements are multiplied with, so that the expected result is the data."""
    kept = LEVELS - _dropped_levels(share)
    return LEVELS / kept if kept else 1.0


def _dropped_levels(share: float) -> int:
    return round(share * LEVELS)
