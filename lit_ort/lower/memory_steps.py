"""Strided views as what ONNX has in their place: a reshape, a slice and a transposition of contiguous memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lit_ort.regions.symbolic_size import Number, Size, divides, quotient, value_of


@dataclass(frozen=True)
class MemorySteps:
    """The elements at offset + the sum of index · stride as those of a part of memory's dimensions.

    Args:
        shape: memory's dimensions, from the largest stride on.
        starts: where the part begins in each dimension.
        sizes: of the part.
        order: for each dimension, the position of the axis of the view that runs along it.
    """

    shape: tuple[Number, ...]
    starts: tuple[Number, ...]
    sizes: tuple[Number, ...]
    order: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the view has every element."""
        return self.sizes == self.shape


def memory_steps(count: Number, axes: Sequence[tuple[Number, Number]], offset: Number) -> MemorySteps | None:
    """The steps of a view; None if there are none for all values of symbolic sizes.

    Args:
        count: the number of elements in memory.
        axes: size and stride of each axis.
        offset: of the view's first element.
    """
    if any(value_of(stride) <= 0 for _, stride in axes):
        return None
    order = sorted(range(len(axes)), key=lambda axis: -value_of(axes[axis][1]))
    sizes, strides = [axes[axis][0] for axis in order], [axes[axis][1] for axis in order]
    if not strides or strides[-1] != 1:
        # The elements between two neighbours of the view, of which it has one.
        sizes, strides = [*sizes, 1], [*strides, 1]
    shape, starts, above = list[Number](), list[Number](), count
    for size, stride in zip(sizes, strides, strict=True):
        start = _start(offset, stride)
        if start is None or not divides(stride, above):
            return None
        length = quotient(above, stride)
        if not _is_never_negative(length - (start + size)):
            return None
        shape.append(length)
        starts.append(start)
        offset, above = offset - start * stride, stride
    return MemorySteps(tuple(shape), tuple(starts), tuple(sizes), tuple(order)) if offset == 0 else None


def _start(offset: Number, stride: Number) -> Number | None:
    """How often a stride is in an offset."""
    if isinstance(offset, int) and isinstance(stride, int):
        return offset // stride
    return quotient(offset, stride) if divides(stride, offset) else 0 if value_of(offset) < value_of(stride) else None


def _is_never_negative(number: Number) -> bool:
    """Whether a number is at least 0 for all sizes, as far as the signs of its terms tell."""
    if isinstance(number, Size):
        return all(factor > 0 for _, factor in number.terms)
    return number >= 0
