"""An operator that adds values to slices of a tensor, as in the gradient of a tensor that is read by slices.

For two halves of a tensor of 4 x 256 x 512, it takes 0.08 ms. The sum of two tensors of zeros that contain one slice
each takes 0.12 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lit_ort.ops.operator import Allocator, Operator, define

aten = torch.ops.aten


def add_slices(
    allocator: Allocator,
    base: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    sizes: Sequence[int],
    dims: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    steps: Sequence[int],
) -> torch.Tensor:
    """Adds parts to slices of a tensor.

    Args:
        allocator: allocates the result.
        base: float[sizes]; None for zeros.
        parts: the k-th part has the shape of `aten.slice(base, dims[k], starts[k], ends[k], steps[k])`.
        sizes: the shape of the result.
        dims, starts, ends, steps: the slices.

    Returns:
        float[sizes], contiguous.
    """
    out = allocator.empty(*sizes, dtype=parts[0].dtype)
    if base is not None:
        return add_slices_onto(allocator, out.copy_(base), parts, sizes, dims, starts, ends, steps)
    views = [aten.slice.Tensor(out, *bounds) for bounds in zip(dims, starts, ends, steps, strict=True)]
    ranges = _ranges(sizes, dims, starts, ends, steps)
    if not _cover(ranges, sizes, dims):
        out.zero_()
    for k, (view, part) in enumerate(zip(views, parts, strict=True)):
        is_disjoint = all(dims[j] == dims[k] and are_disjoint(ranges[j], ranges[k]) for j in range(k))
        view.copy_(part) if is_disjoint else view.add_(part)
    return out


def add_slices_onto(
    allocator: Allocator,
    base: torch.Tensor,
    parts: Sequence[torch.Tensor],
    sizes: Sequence[int],
    dims: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    steps: Sequence[int],
) -> torch.Tensor:
    """Adds parts to slices of `base` in place, and returns it."""
    for part, *bounds in zip(parts, dims, starts, ends, steps, strict=True):
        aten.slice.Tensor(base, *bounds).add_(part)
    return base


def _ranges(
    sizes: Sequence[int], dims: Sequence[int], starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]
) -> list[range]:
    slices = zip(dims, starts, ends, steps, strict=True)
    return [range(sizes[dim])[slice(start, end, step)] for dim, start, end, step in slices]


def are_disjoint(a: range, b: range) -> bool:
    """Whether two slices are known to share no index."""
    if not a or not b:
        return True
    return a[-1] < b[0] or b[-1] < a[0] or (a.step == b.step and (a.start - b.start) % a.step != 0)


def _cover(ranges: Sequence[range], sizes: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether slices of one dimension are disjoint and cover all of its indices."""
    if len(set(dims)) != 1 or sum(map(len, ranges)) != sizes[dims[0]]:
        return False
    return all(are_disjoint(a, b) for k, a in enumerate(ranges) for b in ranges[:k])


def _fake(base: torch.Tensor | None, parts: Sequence[torch.Tensor], sizes: Sequence[int], *_: Any) -> torch.Tensor:
    return parts[0].new_empty(list(sizes))


ADD_SLICES = define(
    "add_slices(Tensor? base, Tensor[] parts, SymInt[] sizes, int[] dims, SymInt[] starts, SymInt[] ends, "
    "SymInt[] steps) -> Tensor",
    add_slices,
    _fake,
)

OPERATORS = (Operator(ADD_SLICES, add_slices),)
