"""The arguments of the machine code of convolutions, from the sizes of a call."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lit_ort.kernels import convolution_arguments as convolution
from lit_ort.kernels import matmul_arguments as matmul
from lit_ort.kernels import weight_gradient_arguments as words
from lit_ort.kernels.convolution_arguments import image_blocks
from lit_ort.kernels.depthwise_convolution_text import PIXELS as DEPTHWISE_PIXELS
from lit_ort.kernels.depthwise_gradient_text import VECTORS as DEPTHWISE_VECTORS
from lit_ort.kernels.kernel_arguments import ROW_BLOCKS
from lit_ort.kernels.matmul_text import SUMMED, MatmulText
from lit_ort.kernels.weight_gradient_text import tile_heights
from lit_ort.regions.element_types import size_of

# The weight's columns of a tile, which a thread copies, take so many bytes at most: half of a second-level cache.
_PANEL_BYTES = 2**18
# A weight's gradient is the sum of sums of about so many pixels.
_PIXELS = 256
# The memory of zeros that pixels outside of images are read from, for all calls; it is never freed.
_ZEROS = torch.zeros(_PANEL_BYTES // 16)


@dataclass(frozen=True)
class Windows:
    """How a convolution reads images.

    Args:
        kernel, stride, padding, dilation: height and width, in pixels.
        groups: into how many groups channels are cut; those of a group are convolved by themselves.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int = 1

    @property
    def runs_across(self) -> int:
        """The runs of elements that are adjacent in an image, of a row of the kernel."""
        return 1 if self.dilation[1] == self.groups == 1 else self.kernel[1]


class Sizes(NamedTuple):
    """The sizes of a call.

    Args:
        first, second: the shapes of two values of images, [batch, channels, height, width]: the images and the result
            of a convolution, or the result's gradient and the images of a weight's gradient.
        windows: how the convolution reads its images.
        threads: how many compute it.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    windows: Windows
    threads: int


@dataclass(frozen=True)
class Machine:
    """What code is made for.

    Args:
        dtype: of results.
        vector_bytes: the width of vectors.
        pair: the elements of a factor that the code reads as one: two of bfloat16, or one.
    """

    dtype: str
    vector_bytes: int
    pair: int = 1

    @property
    def lanes(self) -> int:
        return self.vector_bytes // size_of(self.dtype)

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns of a tile of a matmul."""
        text = MatmulText(self.dtype, self.vector_bytes)
        return text.rows, text.columns


class Arguments:
    """The arguments of calls with certain sizes, without the addresses of tensors.

    Args:
        count: the number of words.
        values: the words that are not zero, by their positions.
        tables: what some words are the addresses of.
    """

    def __init__(self, count: int, values: Mapping[int, int], tables: Sequence[ctypes.Array[ctypes.c_int64]] = ()):
        self.words = _array([values.get(position, 0) for position in range(count)])
        self._tables = tables


def convolution_words(sizes: Sizes, machine: Machine, is_gradient: bool) -> Arguments:
    """The arguments of a convolution, or of the gradient of its images.

    The images of the gradient are the result of the convolution, and its result are the convolution's images.
    """
    batch, channels, *size = sizes.first
    channels //= machine.pair
    sizes = Sizes((batch, channels, *size), *sizes[1:])
    outputs = sizes.second[1] // machine.pair
    weight_channels = (outputs if is_gradient else channels) // sizes.windows.groups
    row = math.prod(sizes.windows.kernel) * weight_channels
    weight_elements = (channels if is_gradient else outputs * machine.pair) * row
    grids = _Grids(sizes, Weight(sizes.windows.groups, weight_channels, weight_elements), is_gradient)
    step = max(machine.lanes, _PANEL_BYTES // (machine.tile[1] * size_of(machine.dtype) * grids.most_taps))
    step = min(channels // sizes.windows.groups, step - step % machine.lanes)
    values = grids.words(machine.tile) | {
        # The weights of two outputs are a pair, each in elements of its own.
        matmul.RIGHT_ROW: row * machine.pair if is_gradient else 1,
        matmul.RIGHT_COLUMN: 1 if is_gradient else row,
        convolution.CHANNEL_STEP: step,
        convolution.TAP_STEP: max(1, SUMMED // step),
    }
    return Arguments(convolution.WORDS, values, grids.tables)


def depthwise_words(sizes: Sizes, machine: Machine, is_gradient: bool) -> Arguments:
    """The arguments of a convolution of each channel, or of the gradient of its images; as `convolution_words`."""
    grids = _Grids(sizes, Weight(1, sizes.first[1], 0), is_gradient)
    return Arguments(convolution.WORDS, grids.words((DEPTHWISE_PIXELS, machine.tile[1])), grids.tables)


class Weight(NamedTuple):
    """How a convolution's code reads the weight.

    Args:
        groups: into how many groups of channels it is cut.
        channels: the elements between neighbouring elements of the kernel.
        elements: of all groups.
    """

    groups: int
    channels: int
    elements: int


class _Grids:
    """The grids of a result and the tables of their taps.

    Neighbouring pixels of a gradient read different elements of the kernel if the convolution has strides.
    """

    def __init__(self, sizes: Sizes, weight: Weight, is_gradient: bool) -> None:
        self._sizes, self._weight, self._is_gradient = sizes, weight, is_gradient
        _, outputs, height, width = sizes.second
        self._spacing = sizes.windows.stride if is_gradient else (1, 1)
        self._grids, tables = list[list[int]](), list[ctypes.Array[ctypes.c_int64]]()
        for group, *start in itertools.product(range(weight.groups), *map(range, self._spacing)):
            ends = zip((height, width), start, self._spacing, strict=True)
            rows, columns = (-(-(size - one) // step) for size, one, step in ends)
            if rows > 0 and columns > 0:
                taps = self._taps(start, group)
                tables.append(_array([word for tap in taps for word in tap]))
                place = (start[0] * width + start[1]) * outputs + group * outputs // weight.groups
                self._grids.append([ctypes.addressof(tables[-1]), len(taps), rows, columns, place])
        self._table = _array([word for grid in self._grids for word in grid])
        self.tables = [self._table, *tables]

    @property
    def most_taps(self) -> int:
        return max(1, *(grid[convolution.TAP_COUNT] for grid in self._grids))

    def words(self, tile: tuple[int, int]) -> dict[int, int]:
        """The words of the sizes of a convolution and of its grids."""
        (batch, channels, height, width), (_, outputs, rows, columns) = self._sizes.first, self._sizes.second
        pixels = batch * max(grid[convolution.GRID_HEIGHT] * grid[convolution.GRID_WIDTH] for grid in self._grids)
        own_outputs = outputs // self._weight.groups
        blocks, axis = _blocks(-(-pixels // tile[0]), -(-own_outputs // tile[1]), self._sizes.threads)
        strides = (1, 1) if self._is_gradient else self._sizes.windows.stride
        return {
            ROW_BLOCKS: blocks,
            matmul.AXIS: axis,
            matmul.COUNT: batch,
            matmul.COLUMNS: own_outputs,
            matmul.INNER: channels // self._weight.groups,
            convolution.PIXEL: channels,
            convolution.HEIGHT: height,
            convolution.WIDTH: width,
            convolution.ROW_STRIDE: strides[0],
            convolution.COLUMN_STRIDE: strides[1],
            convolution.RESULT_IMAGE: rows * columns * outputs,
            convolution.RESULT_LINE: self._spacing[0] * columns * outputs,
            convolution.RESULT_PIXEL: self._spacing[1] * outputs,
            convolution.MOST_TAPS: self.most_taps,
            convolution.ZEROS: _ZEROS.data_ptr(),
            convolution.GRIDS: ctypes.addressof(self._table),
            convolution.GRID_COUNT: len(self._grids),
        }

    def _taps(self, start: Sequence[int], group: int) -> list[tuple[int, ...]]:
        """The words of the elements of the kernel that the pixels of a grid read, of a group of channels."""
        (_, channels, _, width), weight = self._sizes.first, self._weight
        place, element = (group * count // weight.groups for count in (channels, weight.elements))
        kernel = itertools.product(*map(range, self._sizes.windows.kernel))
        shifts = ((number, self._shift(places, start)) for number, places in enumerate(kernel))
        return [
            (*shift, (shift[0] * width + shift[1]) * channels + place, number * weight.channels + element)
            for number, shift in shifts
            if shift is not None
        ]

    def _shift(self, places: Sequence[int], start: Sequence[int]) -> tuple[int, int] | None:
        """How far from a pixel the one is that it reads for an element of the kernel; None if it reads none."""
        windows = self._sizes.windows
        sizes = zip(places, windows.dilation, windows.padding, strict=True)
        shifts = [place * step - padding for place, step, padding in sizes]
        if not self._is_gradient:
            return shifts[0], shifts[1]
        distances = [one - shift for one, shift in zip(start, shifts, strict=True)]
        if any(distance % step for distance, step in zip(distances, windows.stride, strict=True)):
            return None
        down, right = (distance // step for distance, step in zip(distances, windows.stride, strict=True))
        return down, right


def weight_gradient_words(sizes: Sizes, machine: Machine) -> Arguments:
    """The arguments of the gradient of a weight, [outputs, *`runs_of`]."""
    batch, outputs, height, width = sizes.first
    runs, elements = runs_of(sizes.windows, sizes.second[1], machine.lanes)
    tiles = _tiles_of_groups(outputs, sizes.second[1], sizes.windows.groups, tile_heights(machine.vector_bytes))
    table = _array([word for tile in tiles for word in tile])
    units = len(tiles) * runs * -(-elements // machine.tile[1])
    values = _image_words(sizes) | {
        ROW_BLOCKS: max(1, min(sizes.threads, units)),
        matmul.ROWS: outputs,
        matmul.COUNT: batch * height,
        matmul.RESULT_ROW: runs * elements,
        words.RUN: elements,
        words.RUNS_ACROSS: sizes.windows.runs_across,
        words.UNITS: units,
        words.LINES: -(-_PIXELS // max(1, width)),
        words.TILES: ctypes.addressof(table),
        words.TILE_COUNT: len(tiles),
    }
    return Arguments(words.WORDS, values, [table])


def _tiles_of_groups(outputs: int, channels: int, groups: int, heights: Sequence[int]) -> list[tuple[int, int, int]]:
    """The first output of each tile, how many it has, and the first channel that they read."""
    tiles = _tiles(outputs // groups, heights)
    starts = [(group * outputs // groups, group * channels // groups) for group in range(groups)]
    return [(output + first, height, channel) for output, channel in starts for first, height in tiles]


def _tiles(outputs: int, heights: Sequence[int]) -> list[tuple[int, int]]:
    """The first output of each tile and how many it has: as few of one output as can be, then as few as can be."""
    large, _, single = heights
    choices = (_heights(outputs, number, heights) for number in range(outputs // large + 1))
    sizes = min(choices, key=lambda chosen: (chosen.count(single), len(chosen)))
    return list(zip(itertools.accumulate([0, *sizes]), sizes, strict=False))


def _heights(outputs: int, large_count: int, heights: Sequence[int]) -> list[int]:
    """The heights of tiles, as many of them the largest one."""
    large, small, single = heights
    small_count, singles = divmod(outputs - large_count * large, small)
    return [large] * large_count + [small] * small_count + [single] * singles


def runs_of(windows: Windows, channels: int, lanes: int) -> tuple[int, int]:
    """The runs of a weight's gradient, and the elements that it has for each: whole vectors."""
    elements = windows.kernel[1] // windows.runs_across * channels // windows.groups
    return windows.kernel[0] * windows.runs_across, -(-elements // lanes) * lanes


def depthwise_gradient_words(sizes: Sizes, machine: Machine) -> Arguments:
    """The arguments of the gradient of the weight of a convolution of each channel, in `image_blocks` parts."""
    batch, channels = sizes.second[:2]
    parts = image_blocks(channels)
    values = _image_words(sizes) | {
        ROW_BLOCKS: parts * -(-channels // (DEPTHWISE_VECTORS * machine.lanes)),
        matmul.COUNT: batch,
        words.PARTS: parts,
        words.KERNEL_HEIGHT: sizes.windows.kernel[0],
        words.KERNEL_WIDTH: sizes.windows.kernel[1],
    }
    return Arguments(words.WORDS, values)


def _image_words(sizes: Sizes) -> dict[int, int]:
    (_, channels, height, width), windows = sizes.second, sizes.windows
    return {
        words.HEIGHT: height,
        words.ROW_ELEMENTS: width * channels,
        words.CHANNELS: channels,
        words.OUT_HEIGHT: sizes.first[2],
        words.OUT_WIDTH: sizes.first[3],
        words.ROW_STRIDE: windows.stride[0],
        words.ROW_PADDING: windows.padding[0],
        words.COLUMN_PADDING: windows.padding[1],
        words.ROW_DILATION: windows.dilation[0],
        words.COLUMN_DILATION: windows.dilation[1],
        words.PIXEL_DISTANCE: windows.stride[1] * channels,
    }


def _blocks(row_units: int, column_units: int, threads: int) -> tuple[int, int]:
    """Into how many blocks a result is cut, and of what: where the largest part is smaller."""
    largest = {matmul.BY_ROWS: row_units, matmul.BY_COLUMNS: column_units}
    axis = min(largest, key=lambda one: -(-largest[one] // threads) / largest[one])
    return min(threads, largest[axis]), axis


def _array(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(1, len(values)))(*values)
