"""Views of tensors as sizes, strides and an offset, with the view operators of ATen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lit_ort.regions.symbolic_size import Number, divides, product, quotient


def contiguous_strides(shape: Sequence[Number]) -> tuple[Number, ...]:
    strides, step = list[Number](), 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (size if size != 0 else 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class StridedView:
    """Elements at offset + the sum of index · stride."""

    shape: tuple[Number, ...]
    strides: tuple[Number, ...]
    offset: Number = 0

    @staticmethod
    def of(shape: Sequence[Number]) -> StridedView:
        """All of a contiguous tensor."""
        return StridedView(tuple(shape), contiguous_strides(shape))

    @property
    def size(self) -> Number:
        return product(self.shape)

    def permute(self, order: Sequence[int]) -> StridedView:
        axes = [axis % len(self.shape) for axis in order]
        return StridedView(tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)

    def expand(self, shape: Sequence[Number]) -> StridedView:
        """Broadcast to a shape; -1 keeps a size."""
        new = len(shape) - len(self.shape)
        strides: list[Number] = [0] * new
        sizes = list(shape[:new])
        for wanted, size, stride in zip(shape[new:], self.shape, self.strides, strict=True):
            sizes.append(size if wanted == -1 else wanted)
            # Sizes that are equal can be different polynomials, by what a trace has found out about symbols.
            strides.append(0 if size == 1 else stride)
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

    def narrow(self, axis: int, start: Number, size: Number, step: int = 1) -> StridedView:
        """`size` elements of an axis from `start` on; negative starts count from the end."""
        axis %= len(self.shape)
        shape, strides = list(self.shape), list(self.strides)
        start = start + self.shape[axis] if start < 0 else start
        shape[axis], strides[axis] = size, self.strides[axis] * step
        return StridedView(tuple(shape), tuple(strides), self.offset + start * self.strides[axis])

    def select(self, axis: int, index: Number) -> StridedView:
        axis %= len(self.shape)
        index = index + self.shape[axis] if index < 0 else index
        kept = [other for other in range(len(self.shape)) if other != axis]
        view = self.permute(kept)
        return StridedView(view.shape, view.strides, self.offset + index * self.strides[axis])

    def diagonal(self, offset: int = 0, first: int = 0, second: int = 1) -> StridedView | None:
        """The elements whose index along `second` is `offset` more than along `first`, along a new last axis.

        None for sizes that are no numbers.
        """
        rows, columns = self.shape[first], self.shape[second]
        if not isinstance(rows, int) or not isinstance(columns, int):
            return None
        row, column = self.strides[first], self.strides[second]
        rank = len(self.shape)
        kept = self.permute([axis for axis in range(rank) if axis not in (first % rank, second % rank)])
        size = min(rows + min(offset, 0), columns - max(offset, 0))
        start = self.offset + max(offset, 0) * column + max(-offset, 0) * row
        return StridedView((*kept.shape, size), (*kept.strides, row + column), start)

    def flip(self, axes: Sequence[int]) -> StridedView:
        """With axes in reverse order."""
        strides, offset = list(self.strides), self.offset
        for axis in axes:
            offset = offset + (self.shape[axis] - 1) * strides[axis]
            strides[axis] = -strides[axis]
        return StridedView(self.shape, tuple(strides), offset)

    def windows(self, axis: int, size: int, step: int, count: Number) -> StridedView:
        """`count` windows of `size` elements of an axis, each `step` behind the one before, along a new last axis."""
        shape, strides = list(self.shape), list(self.strides)
        stride = strides[axis]
        shape[axis], strides[axis] = count, stride * step
        return StridedView((*shape, size), (*strides, stride), self.offset)

    def reshape(self, shape: Sequence[Number]) -> StridedView | None:
        """Another shape of the same elements in the same order; None if that is no view."""
        if self.size == 0:
            return StridedView.of(shape)
        strides: list[Number] = []
        dims = list(self.merged())
        left: tuple[Number, Number] = dims.pop() if dims else (1, 0)
        for size in reversed(shape):
            if size == 1:
                strides.append(0)
                continue
            if left[0] == 1 and dims:
                left = dims.pop()
            if not divides(size, left[0]):
                return None
            strides.append(left[1])
            left = (quotient(left[0], size), left[1] * size)
        return StridedView(tuple(shape), tuple(reversed(strides)), self.offset)

    def merged(self) -> tuple[tuple[Number, Number], ...]:
        """(size, stride) of the axes, those of size 1 left out and neighbours merged where they can be."""
        dims: list[tuple[Number, Number]] = []
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


def cuts_of(dims: Sequence[tuple[Number, Number]]) -> set[Number]:
    """The sizes of the suffixes of axes: where the index arithmetic of these axes cuts a linear index."""
    cuts, total = set[Number](), 1
    for size, _ in reversed(dims):
        total = total * size
        cuts.add(total)
    return cuts


def is_chain(cuts: set[Number]) -> bool:
    """Whether each cut divides the next, so that all views are views of the same axes."""
    ordered = sorted(cuts)
    return all(divides(small, large) for small, large in zip(ordered, ordered[1:], strict=False))


def strides_over(dims: Sequence[tuple[Number, Number]], cuts: Sequence[Number]) -> list[Number]:
    """The strides over the axes between ascending cuts, outermost first; beyond the dims' elements they are 0."""
    strides: list[Number] = []
    for low in (1, *cuts[:-1]):
        total, stride = 1, 0
        for size, step in reversed(dims):
            if total <= low < total * size:
                stride = step * quotient(low, total)
                break
            total = total * size
        strides.insert(0, stride)
    return strides
