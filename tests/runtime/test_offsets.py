"""Offsets in one block: values in use together are apart, and the block is little more than the peak of their sizes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_ort.runtime.buffers import ALIGNMENT
from lit_ort.runtime.offsets import offsets_of

Use = tuple[int, int, int]


@st.composite
def uses(draw: st.DrawFn) -> list[Use]:
    positions = st.integers(0, 12)
    pairs = draw(st.lists(st.tuples(positions, positions, st.integers(0, 1000)), max_size=20))
    return [(min(first, last), max(first, last), size) for first, last, size in pairs]


@given(uses())
@settings(deadline=None)
def test_values_in_use_together_are_apart(uses: list[Use]) -> None:
    offsets, end = offsets_of(uses)
    parts = list(zip(uses, offsets, strict=True))
    for k, ((first, last, size), offset) in enumerate(parts):
        assert offset % ALIGNMENT == 0
        assert offset + size <= end
        for (other_first, other_last, other_size), other in parts[:k]:
            if size and other_size and first <= other_last and other_first <= last:
                assert offset + size <= other or other + other_size <= offset


@pytest.mark.parametrize("layers", [1, 8, 40])
def test_a_backward_needs_the_peak_of_its_sizes(layers: int) -> None:
    """Activations are read in the order opposite to that in which they were computed; gradients remain."""
    generator, unit = random.Random(layers), 64 * ALIGNMENT
    activations = [generator.randint(1, 8) * unit for _ in range(layers)]
    gradients = [generator.randint(1, 8) * unit for _ in range(layers)]
    uses = [(k, 2 * layers - k - 1, size) for k, size in enumerate(activations)]
    uses += [(2 * layers - k - 1, 2 * layers, size) for k, size in enumerate(gradients)]
    peak = max(sum(size for first, last, size in uses if first <= now <= last) for now in range(2 * layers + 1))
    _, end = offsets_of(uses)
    assert peak <= end <= 1.1 * peak


def test_nothing_needs_no_memory() -> None:
    assert offsets_of([]) == ([], 0)
