"""Random masks: numbers of 16 bits, four from each draw of a fast generator, compared with the share to drop.

A mask takes a tenth of the time of as many Bernoulli draws of torch's, and follows from its seed and stream alone.

Source: the generator is SFC64 (Doty-Humphrey, PractRand), seeded through SeedSequence (O'Neill 2015); both NumPy's.
"""

from __future__ import annotations

import numpy as np
import torch

LEVELS = 2**16
# The seed of a run without dropout, as verification compares it.
OFF = -1
# Elements whose numbers are drawn at a time: 1 MB.
CHUNK_ELEMENTS = 2**19
_UNSIGNED = 2**64 - 1


class Draws:
    """Independent numbers, uniform over int16, the same ones for the same seed and stream."""

    def __init__(self, seed: int, stream: int) -> None:
        # Seeds and streams that are next to each other give unrelated states.
        sequence = np.random.SeedSequence(seed & _UNSIGNED, spawn_key=(stream & _UNSIGNED,))
        self._generator = np.random.Generator(np.random.SFC64(sequence))

    def take(self, count: int) -> torch.Tensor:
        """The next `count` numbers, int16[count]."""
        numbers = self._generator.integers(0, 2**64, -(-count // 4), dtype=np.uint64)
        return torch.from_numpy(numbers.view(np.int16))[:count]


def share_to_drop(seed: torch.Tensor | None, p: float) -> float:
    """`p`, or 0 where the seed, int64[], says that dropout is off, as None does.

    Raises:
        ValueError: p is no probability.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability is {p}, but has to be between 0 and 1: check the p of the module")
    return 0.0 if seed is None or int(seed) == OFF else p


def draw_mask(mask: torch.Tensor, share: float, seed: int, stream: int) -> None:
    """Fills `mask`, bool[n], with False at random with probability `share`, and with True elsewhere."""
    dropped = dropped_levels(share)
    if dropped in (0, LEVELS):
        mask.fill_(dropped == 0)
        return
    draws, smallest = Draws(seed, stream), smallest_kept(share)
    for part in mask.split(CHUNK_ELEMENTS):
        torch.ge(draws.take(len(part)), smallest, out=part)


def smallest_kept(share: float) -> int:
    """Of numbers uniform over int16, those from this one on are kept where `share`, rounded to `LEVELS`, is dropped."""
    return dropped_levels(share) - LEVELS // 2


def scale_of(share: float) -> float:
    """What the kept elements are multiplied by, so that the expected result is the data."""
    kept = LEVELS - dropped_levels(share)
    return LEVELS / kept if kept else 1.0


def dropped_levels(share: float) -> int:
    """How many of the `LEVELS` numbers mean that an element is dropped."""
    return round(share * LEVELS)
