"""Sums of slices, compared with torch's slice_backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_ort.ops import OPERATORS
from tests.ops.helpers import RecordingAllocator

add_slices = torch.ops.lit_ort.add_slices
LAST = 2**63 - 1
# Dimension, start, end and step of each slice of a 4 x 6 tensor.
CASES = {
    "two halves": [(1, 0, 3, 1), (1, 3, LAST, 1)],
    "strided halves": [(1, 0, LAST, 2), (1, 1, LAST, 2)],
    "a gap": [(1, 0, 2, 1), (1, 4, 6, 1)],
    "overlap": [(1, 0, 4, 1), (1, 2, 6, 1)],
    "different steps": [(1, 0, LAST, 2), (1, 0, LAST, 3)],
    "overlap and gap": [(1, 0, 4, 1), (1, 1, 3, 1)],
    "two dimensions": [(1, 0, 3, 1), (0, 1, 2, 1)],
    "from the end": [(1, -2, LAST, 1), (1, 0, -2, 1)],
    "empty slice": [(1, 3, 3, 1), (1, 0, 6, 1)],
    "one slice": [(0, 1, 3, 1)],
}


def bounds_of(case: str) -> list[list[int]]:
    return [list(column) for column in zip(*CASES[case], strict=True)]


def parts_of(case: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    whole = torch.zeros(4, 6)
    return [torch.randn(torch.ops.aten.slice(whole, *bounds).shape).to(dtype) for bounds in CASES[case]]


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_matches_torch(case: str, dtype: torch.dtype, with_base: bool) -> None:
    parts = parts_of(case, dtype)
    base: Any = torch.randn(4, 6).to(dtype) if with_base else None
    before: Any = None if base is None else base.clone()
    expected = torch.zeros(4, 6, dtype=dtype) if base is None else base.clone()
    for part, bounds in zip(parts, CASES[case], strict=True):
        expected = expected + torch.ops.aten.slice_backward(part, [4, 6], *bounds)
    allocator = RecordingAllocator()
    arguments = (base, parts, [4, 6], *bounds_of(case))
    actual = OPERATORS[add_slices.default].kernel(allocator, *arguments)
    assert torch.equal(actual, expected)
    assert torch.equal(add_slices(*arguments), expected)
    assert allocator.contains(actual)
    assert base is None or torch.equal(base, before)


def test_opcheck() -> None:
    torch.library.opcheck(add_slices.default, (None, parts_of("two halves"), [4, 6], *bounds_of("two halves")))
    torch.library.opcheck(add_slices.default, (torch.randn(4, 6), parts_of("a gap"), [4, 6], *bounds_of("a gap")))
