"""Views of tensors as sizes, strides and an offset, with the view operators of ATen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class StridedView:
    """Elements at offset + the sum of index · stride."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def of(shape: Sequence[int]) -> StridedView:
        """All of a contiguous tensor."""
        return StridedView(tuple(shape), contiguous_strides(shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def permute(self, order: Sequence[int]) -> StridedView:
        axes = [axis % len(self.shape) for axis in order]
        return StridedView(tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)

    def expand(self, shape: Sequence[int]) -> StridedView:
        """Broadcast to a shape; -1 keeps a size."""
        new = len(shape) - len(self.shape)
        strides = [0] * new
        sizes = list(shape[:new])
        for wanted, size, stride in zip(shape[new:], self.shape, self.strides, strict=True):
            sizes.append(size if wanted == -1 else wanted)
            strides.append(stride if sizes[-1] == size else 0)
        return StridedView(tuple(sizes), tuple(strides), self.offset)

    def insert(self, axis: int) -> StridedView:
        axis %= len(self.shape) + 1
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(axis, 1)
        strides.insert(axis, 0)
        return StridedView(tuple(shape), tuple(strides), self.offset)

    def drop(self, axes: Sequence[int]) -> StridedView:
        """Without those of the axes that have size 1."""
        gone = {axis % len(self.shape) for axis in axes}
        kept = [axis for axis, size in enumerate(self.shape) if axis not in gone or size != 1]
        return self.permute(kept)

    def narrow(self, axis: int, start: int, end: int, step: int = 1) -> StridedView:
        """A slice of an axis, with the limits of Python's slices."""
        axis %= len(self.shape)
        chosen = range(self.shape[axis])[start:end:step]
        shape, strides = list(self.shape), list(self.strides)
        shape[axis], strides[axis] = len(chosen), self.strides[axis] * step
        return StridedView(tuple(shape), tuple(strides), self.offset + chosen.start * self.strides[axis])

    def select(self, axis: int, index: int) -> StridedView:
        axis %= len(self.shape)
        index %= max(self.shape[axis], 1)
        kept = [other for other in range(len(self.shape)) if other != axis]
        view = self.permute(kept)
        return StridedView(view.shape, view.strides, self.offset + index * self.strides[axis])

    def reshape(self, shape: Sequence[int]) -> StridedView | None:
        """Another shape of the same elements in the same order; None if that is no view."""
        shape = list(shape)
        if -1 in shape:
            known = -math.prod(shape)
            shape[shape.index(-1)] = self.size // known if known else 0
        if not self.size:
            return StridedView.of(shape)
        strides: list[int] = []
        dims = list(self.merged())
        left = dims.pop() if dims else (1, 0)
        for size in reversed(shape):
            if size == 1:
                strides.append(0)
                continue
            if left[0] == 1 and dims:
                left = dims.pop()
            if left[0] % size:
                return None
            strides.append(left[1])
            left = (left[0] // size, left[1] * size)
        return StridedView(tuple(shape), tuple(reversed(strides)), self.offset)

    def merged(self) -> tuple[tuple[int, int], ...]:
        """(size, stride) of the axes, those of size 1 left out and neighbours merged where they can be."""
        dims: list[tuple[int, int]] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == stride * size:
                dims[-1] = (dims[-1][0] * size, stride)
            else:
                dims.append((size, stride))
        return tuple(dims)

    @property
    def is_whole(self) -> bool:
        """Whether these are neighbouring elements in their order, from the first on."""
        return self.offset == 0 and all(stride == 1 for _, stride in self.merged()) and len(self.merged()) <= 1


def cuts_of(dims: Sequence[tuple[int, int]]) -> set[int]:
    """The sizes of the suffixes of axes: where the index arithmetic of these axes cuts a linear index."""
    cuts, product = set(), 1
    for size, _ in reversed(dims):
        product *= size
        cuts.add(product)
    return cuts


def is_chain(cuts: set[int]) -> bool:
    """Whether each cut divides the next, so that all views are views of the same axes."""
    ordered = sorted(cuts)
    return all(large % small == 0 for small, large in zip(ordered, ordered[1:], strict=False))


def strides_over(dims: Sequence[tuple[int, int]], cuts: Sequence[int]) -> list[int]:
    """The strides over the axes between ascending cuts, outermost first; beyond the dims' elements they are 0."""
    strides: list[int] = []
    for low in (1, *cuts[:-1]):
        product, stride = 1, 0
        for size, step in reversed(dims):
            if product <= low < product * size:
                stride = step * (low // product)
                break
            product *= size
        strides.insert(0, stride)
    return strides
