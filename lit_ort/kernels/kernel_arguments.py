"""The block of arguments that a kernel reads, and how a run is cut into blocks.

All arguments are 64-bit words: a header, sizes, addresses of tensors, places of accesses, scalars. The machine code of
a region knows the position of each; `Layout` is the only place that says what they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

from lit_ort.regions.element_types import is_float, size_of
from lit_ort.regions.pointwise_table import OPERATORS
from lit_ort.regions.region import LONG_SUM, Apply, ColumnReduction, Load, Reduce, Region, Scalar
from lit_ort.regions.region_run import N, Place, RegionRun

# The dtypes that kernels written by hand are for: matmuls, losses and the loops of recurrent layers.
DTYPES: Mapping[torch.dtype, str] = MappingProxyType({torch.float32: "float32", torch.float64: "float64"})
# Those of factors of matmuls and losses.
FACTOR_DTYPES: Mapping[torch.dtype, str] = MappingProxyType({**DTYPES, torch.bfloat16: "bfloat16"})
# The dtypes of the ends of groups of rows.
END_DTYPES: Mapping[torch.dtype, str] = MappingProxyType({torch.int32: "int32", torch.int64: "int64"})

ROW_BLOCKS, COLUMN_BLOCKS, TILE, SCRATCH = 0, 1, 2, 3
DIVISION_BY_ZERO, BAD_INDEX, BAD_VALUE = FLAGS = 4, 5, 6
BLOCK_FUNCTION, FINISH_FUNCTION = 7, 8
ROWS, COLUMNS = 9, 10
_HEADER = 11
WORD = 8

# Vectors begin at multiples of this many columns of a tile, whatever their width: random numbers rely on it.
COLUMN_ALIGNMENT = 64
# Arrays in scratch memory start at cache lines, and have room for a whole vector at their end.
LINE, PADDING = 64, 128

# In instructions of vectors: below the first, threads cost more than they save; blocks are of about the second.
_ONE_BLOCK, _BLOCK = 16_000, 8_000
_MOST_BLOCKS = 64
# Partial results of a column reduction are of at least so many rows.
_ROWS_OF_PARTIAL = 8
_LANES = 16


def sum_dtype(factor: torch.dtype) -> torch.dtype:
    """The dtype in which products of factors are added, and that of results."""
    return torch.float32 if factor == torch.bfloat16 else factor


@dataclass(frozen=True)
class Layout:
    """Positions of the words of a region's arguments."""

    region: Region

    @property
    def rank(self) -> int:
        return self.region.rows + self.region.inner

    def size(self, axis: int) -> int:
        return _HEADER + axis

    def input(self, number: int) -> int:
        return _HEADER + self.rank + number

    def output(self, number: int) -> int:
        return self.input(len(self.region.inputs)) + number

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Of each place: loads, then stores, then columns. A place is the offset, the strides, and two for an index."""
        region = self.region
        counts = [len(load.indices) for load in region.loads] + [len(store.indices) for store in region.stores]
        positions, position = [], self.output(len(region.outputs))
        for count in (*counts, *(0 for _ in region.columns)):
            positions.append(position)
            position += 1 + self.rank + 2 * count
        return (*positions, position)

    def scalar(self, number: int) -> int:
        return self.places[-1] + number

    @property
    def words(self) -> int:
        return self.scalar(self.region.scalars)


@dataclass(frozen=True)
class Blocks:
    """How a run is cut: into blocks of rows times blocks of columns, each of which one thread computes. It depends on
    the sizes alone, so that results are the same for any number of threads."""

    rows: int
    columns: int
    row_blocks: int
    column_blocks: int
    tile: int

    @property
    def count(self) -> int:
        return self.row_blocks * self.column_blocks


def cost_of(region: Region) -> int:
    """The instructions for a vector of points."""
    cost = len(region.stores) + 3 * len(region.columns)
    for full, node in zip(region.full, region.nodes, strict=True):
        if full and isinstance(node, Load):
            cost += 1 if node.access.inner[-1] in "01" and not any(region.full[i] for i in node.indices) else _LANES
        elif full and isinstance(node, Apply) and node.operator != "cast":
            cost += OPERATORS[node.operator].cost
    return cost


class Cut:
    """Cuts the runs of a region into blocks.

    Args:
        region: what decides, besides the sizes of a run.
    """

    def __init__(self, region: Region) -> None:
        self._rows, self._cost = region.rows, cost_of(region)
        self._has_columns, self._can_split = bool(region.columns), _can_split_columns(region)
        self._has_scatter = any(store.target is not None for store in region.stores)

    def blocks(self, sizes: Sequence[int]) -> Blocks:
        """The blocks of a run with these sizes of the axes."""
        rows, columns, width = math.prod(sizes[: self._rows]), math.prod(sizes[self._rows :]), sizes[-1]
        work = rows * (columns // _LANES + 4) * self._cost
        wanted = 1 if work < _ONE_BLOCK else min(_MOST_BLOCKS, work // _BLOCK)
        row_blocks = min(rows, wanted)
        if self._has_columns:
            row_blocks = min(row_blocks, max(1, rows // _ROWS_OF_PARTIAL))
        if self._has_scatter:
            row_blocks = 1
        row_blocks = max(row_blocks, 1)
        most = max(1, -(-wanted // row_blocks)) if self._can_split else 1
        tile = -(-max(width, 1) // (most * COLUMN_ALIGNMENT)) * COLUMN_ALIGNMENT
        return Blocks(rows, columns, row_blocks, max(1, -(-width // tile)), tile)


def _can_split_columns(region: Region) -> bool:
    """Whether no value of a row is computed from the whole row, or written once for it."""
    reduces = any(isinstance(node, Reduce) for node in region.nodes)
    by_column = all(store.access.is_full for store in region.stores)
    return not reduces and by_column and all(region.full[column.value] for column in region.columns)


def partial_dtype(region: Region, column: ColumnReduction) -> str:
    """The dtype that a column reduction is accumulated in: sums of row-level values are few, and in float64."""
    dtype = region.nodes[column.value].dtype
    precise = column.kind in ("sum", "prod") and is_float(dtype) and not region.full[column.value]
    return "float64" if precise or column.kind == LONG_SUM else dtype


def array_bytes(columns: int, dtype: str) -> int:
    """The bytes of an array of scratch memory."""
    return (columns * size_of(dtype) + PADDING + LINE - 1) // LINE * LINE


def words_of(layout: Layout, run: RegionRun[N]) -> Iterator[tuple[int, N]]:
    """The positions of the sizes and of the numbers of places among the arguments, with these numbers."""
    yield from enumerate(run.sizes, layout.size(0))
    places = (number for place in (*run.loads, *run.stores, *run.columns) for number in _numbers(place))
    yield from zip(itertools.count(layout.places[0]), places, strict=False)


def scalars_of(layout: Layout, run: RegionRun[N]) -> Iterator[tuple[int, float | N, bool]]:
    """The positions of the scalars among the arguments, with their values, and whether these are floating-point."""
    dtypes = {node.position: node.dtype for node in layout.region.nodes if isinstance(node, Scalar)}
    for number, value in enumerate(run.scalars):
        yield layout.scalar(number), value, is_float(dtypes.get(number, "int64"))


def _numbers(place: Place[N]) -> list[N]:
    return [place.offset, *place.strides, *(number for index in place.indices for number in index)]
