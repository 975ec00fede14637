"""Offsets of values in one block of memory: values that are in use at the same time don't overlap."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from lit_ort.runtime.buffers import ALIGNMENT


def offsets_of(uses: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """The offset of each value in bytes, and the size of the block.

    Large values are placed first, each in the smallest gap that it fits into between those that are in use with it
    (greedy by size, Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference, 2020).

    Args:
        uses: for each value, the first and the last position at which it is in use, and its size in bytes.
    """
    sizes = [-(-size // ALIGNMENT) * ALIGNMENT for _, _, size in uses]
    offsets, end_of_all = [0] * len(uses), 0
    # The values that are placed, by their offsets.
    order: list[int] = []
    starts: list[int] = []
    first, last = (np.array([use[k] for use in uses], dtype=np.int64) for k in (0, 1))
    for k in sorted(range(len(uses)), key=lambda k: (-sizes[k], uses[k][0])):
        placed = np.array(order, dtype=np.int64)
        beside = placed[(first[placed] <= last[k]) & (last[placed] >= first[k])]
        offsets[k] = _gap([(offsets[other], offsets[other] + sizes[other]) for other in beside], sizes[k])
        position = bisect.bisect(starts, offsets[k])
        order.insert(position, k)
        starts.insert(position, offsets[k])
        end_of_all = max(end_of_all, offsets[k] + sizes[k])
    return offsets, end_of_all


def _gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The start of the smallest gap of this size between parts, or the end of all.

    Args:
        taken: start and end of each part, by their starts; they can overlap.
        size: in bytes.
    """
    best, found, end = None, 0, 0
    for start, next_end in taken:
        gap = start - end
        if gap >= size and (best is None or gap < best):
            best, found = gap, end
        end = max(end, next_end)
    return end if best is None else found
