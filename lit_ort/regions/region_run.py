"""The arguments of a region's run: sizes, where tensors' elements are, and scalars."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from lit_ort.regions.region import Access, Region

# Numbers while a region is formed may be polynomials of sizes; those of a run are integers.
N = TypeVar("N")
M = TypeVar("M")


@dataclass(frozen=True)
class Place(Generic[N]):
    """Where the elements of an access are, in elements from the tensor's address.

    Args:
        offset: the element of index 0 in all axes.
        strides: the stride of each axis.
        indices: for each index of a gather or scatter, its stride and its size, which it must stay below.
    """

    offset: N
    strides: tuple[N, ...]
    indices: tuple[tuple[N, N], ...] = ()

    def map(self, function: Callable[[N], M]) -> Place[M]:
        """The place with other numbers."""
        indices = tuple((function(stride), function(size)) for stride, size in self.indices)
        return Place(function(self.offset), tuple(map(function, self.strides)), indices)


@dataclass(frozen=True)
class RegionRun(Generic[N]):
    """The arguments of a run, apart from the tensors.

    Args:
        sizes: of the axes, row axes first.
        loads: a place for each of `Region.loads`.
        stores: a place for each of `Region.stores`.
        columns: a place for each of `Region.columns`; strides of row axes have no meaning.
        scalars: the values of scalars.
    """

    sizes: tuple[N, ...]
    loads: tuple[Place[N], ...]
    stores: tuple[Place[N], ...] = ()
    columns: tuple[Place[N], ...] = ()
    scalars: tuple[float | N, ...] = ()

    def map(self, function: Callable[[N], M]) -> RegionRun[M]:
        """The arguments with other numbers."""
        places = ([place.map(function) for place in places] for places in (self.loads, self.stores, self.columns))
        scalars: list[float | M] = []
        for scalar in self.scalars:
            scalars.append(scalar if isinstance(scalar, float) else function(cast(N, scalar)))
        return RegionRun(tuple(map(function, self.sizes)), *map(tuple, places), scalars=tuple(scalars))


def check_run(region: Region, run: RegionRun[int]) -> None:
    """Check that arguments are those of a region.

    Raises:
        ValueError: a number of them is wrong, a stride contradicts the region, or an index selects from nothing.
    """
    if len(run.sizes) != region.rows + region.inner or min(run.sizes) < 0:
        raise ValueError(f"The sizes {run.sizes} aren't those of {region.rows} row axes and {region.inner} inner axes.")
    if len(run.scalars) != region.scalars:
        raise ValueError(f"{len(run.scalars)} scalars are given; the region has {region.scalars}.")
    accesses = (
        [(load.access, len(load.indices)) for load in region.loads],
        [(store.access, len(store.indices)) for store in region.stores],
        [(column.access, 0) for column in region.columns],
    )
    for expected, places in zip(accesses, (run.loads, run.stores, run.columns), strict=True):
        if len(expected) != len(places):
            raise ValueError(f"{len(places)} places are given for {len(expected)} accesses: {places}.")
        for (access, indices), place in zip(expected, places, strict=True):
            _check_place(region, run, access, place, indices)


def _check_place(region: Region, run: RegionRun[int], access: Access, place: Place[int], indices: int) -> None:
    fixed = {"0": 0, "1": 1}
    inner = place.strides[region.rows :]
    if len(place.strides) != len(run.sizes) or len(place.indices) != indices:
        raise ValueError(f"{place} isn't a place of {access} with {indices} indices.")
    for kind, stride in zip(access.inner, inner, strict=True):
        if fixed.get(kind, stride) != stride:
            raise ValueError(f"The stride {stride} of {place} contradicts {access}.")
    if math.prod(run.sizes) and any(size <= 0 for _, size in place.indices):
        raise ValueError(f"An index of {place} selects from a dimension of size 0.")
