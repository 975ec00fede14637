"""Random dropout masks: 16-bit numbers, four from each draw of a fast generator, are compared with a threshold.

A mask takes a tenth of the time of torch's Bernoulli draws, and is determined by its seed and stream.

Source: NumPy's SFC64 generator (Doty-Humphrey, PractRand) and its SeedSequence (O'Neill 2015).
"""

from __future__ import annotations

import numpy as np
import torch

from lit_ort.regions.counter_random import DROPOUT_OFF

LEVELS = 2**16
# The number of elements for which numbers are drawn at a time: 1 MB.
CHUNK_ELEMENTS = 2**19
_UNSIGNED = 2**64 - 1


class Draws:
    """Independent random numbers, uniform over int16, determined by a seed and a stream."""

    def __init__(self, seed: int, stream: int) -> None:
        # SeedSequence produces unrelated states for consecutive seeds and streams.
        sequence = np.random.SeedSequence(seed & _UNSIGNED, spawn_key=(stream & _UNSIGNED,))
        self._generator = np.random.Generator(np.random.SFC64(sequence))

    def take(self, count: int) -> torch.Tensor:
        """The next `count` numbers, int16[count]."""
        numbers = self._generator.integers(0, 2**64, -(-count // 4), dtype=np.uint64)
        return torch.from_numpy(numbers.view(np.int16))[:count]


def drop_probability(seed: torch.Tensor | None, p: float) -> float:
    """The dropout probability `p`, or 0 if the seed, int64[], is `DROPOUT_OFF` or None.

    Raises:
        ValueError: p is not between 0 and 1.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability is {p}, but must be between 0 and 1: check the p of the module")
    return 0.0 if seed is None or int(seed) == DROPOUT_OFF else p


def draw_mask(mask: torch.Tensor, share: float, seed: int, stream: int) -> None:
    """Fills `mask`, bool[n], with False with probability `share`, and with True otherwise."""
    dropped = dropped_levels(share)
    if dropped in (0, LEVELS):
        mask.fill_(dropped == 0)
        return
    draws, smallest = Draws(seed, stream), smallest_kept(share)
    for part in mask.split(CHUNK_ELEMENTS):
        torch.ge(draws.take(len(part)), smallest, out=part)


def smallest_kept(share: float) -> int:
    """The threshold of numbers that are uniform over int16: elements with a smaller number are dropped."""
    return dropped_levels(share) - LEVELS // 2


def scale_of(share: float) -> float:
    """The factor of elements that are kept, so that the expected value is unchanged."""
    kept_levels = LEVELS - dropped_levels(share)
    return LEVELS / kept_levels if kept_levels else 1.0


def dropped_levels(share: float) -> int:
    """The number of the `LEVELS` 16-bit numbers for which an element is dropped."""
    return round(share * LEVELS)
