"""The sum of values that lie in slices of a larger one, each zero elsewhere, as the gradient of what is read by slices.

At 4 x 256 x 512 with two halves: 0.08 ms; two tensors of zeros with a slice each and their sum 0.12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lit_ort.ops.operator import Memory, Operator, define

aten = torch.ops.aten


def add_slices(
    memory: Memory,
    base: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    sizes: Sequence[int],
    dims: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    steps: Sequence[int],
) -> torch.Tensor:
    """Adds parts to slices of a value.

    Args:
        base: float[sizes]; None for zeros.
        parts: the k-th of the shape of `aten.slice(base, dims[k], starts[k], ends[k], steps[k])`.
        sizes: of the result.

    Returns:
        float[sizes], contiguous.
    """
    out = memory.empty(*sizes, dtype=parts[0].dtype)
    views = [aten.slice.Tensor(out, *given) for given in zip(dims, starts, ends, steps, strict=True)]
    if base is not None:
        out.copy_(base)
        for view, part in zip(views, parts, strict=True):
            view.add_(part)
        return out
    places = _places(sizes, dims, starts, ends, steps)
    if not _fill(places, sizes, dims):
        out.zero_()
    for k, (view, part) in enumerate(zip(views, parts, strict=True)):
        apart = all(dims[j] == dims[k] and _are_apart(places[j], places[k]) for j in range(k))
        view.copy_(part) if apart else view.add_(part)
    return out


def _places(
    sizes: Sequence[int], dims: Sequence[int], starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]
) -> list[range]:
    given = zip(dims, starts, ends, steps, strict=True)
    return [range(sizes[dim])[slice(start, end, step)] for dim, start, end, step in given]


def _are_apart(a: range, b: range) -> bool:
    """Whether two slices surely share no place."""
    if not a or not b:
        return True
    return a[-1] < b[0] or b[-1] < a[0] or (a.step == b.step and (a.start - b.start) % a.step != 0)


def _fill(places: Sequence[range], sizes: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether slices of one dimension are apart and leave no place out."""
    if len(set(dims)) != 1 or sum(map(len, places)) != sizes[dims[0]]:
        return False
    return all(_are_apart(a, b) for k, a in enumerate(places) for b in places[:k])


def _fake(base: torch.Tensor | None, parts: Sequence[torch.Tensor], sizes: Sequence[int], *_: Any) -> torch.Tensor:
    return parts[0].new_empty(list(sizes))


_ADD = define(
    "add_slices(Tensor? base, Tensor[] parts, SymInt[] sizes, int[] dims, SymInt[] starts, SymInt[] ends, "
    "SymInt[] steps) -> Tensor",
    add_slices,
    _fake,
)

OPERATORS = (Operator(_ADD, add_slices),)
