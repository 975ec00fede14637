"""The order of a region's axes: the last one runs in vectors, so it should not be a short one.

Windows of two channels, for example, are copied with the time as the last axis, although the channels are adjacent in
the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from lit_ort.regions.region import (
    BROADCAST,
    CONTIGUOUS,
    STRIDED,
    Access,
    ColumnReduction,
    Index,
    Load,
    Node,
    Reduce,
    Region,
    Store,
    check,
)
from lit_ort.regions.region_run import Place, RegionRun
from lit_ort.regions.symbolic_size import Number, value_of

_LANES = 16
# Nanoseconds of a row, of a vector, and of reading or writing a vector of elements that are not adjacent. A copy of
# rows of 2 elements takes 10 ns a row (AMD EPYC, family 25, model 17, AVX-512).
_ROW, _VECTOR, _APART = 2.5, 0.5, 10.0
# The estimate has to be so much better, since adjacent rows share lines of the cache in the order of the result.
_CLEARLY = 0.6
_Written = TypeVar("_Written", Store, ColumnReduction)


def with_long_last_axis(region: Region, run: RegionRun[Number]) -> tuple[Region, RegionRun[Number]]:
    """The region and its arguments, with another axis as the last one if that is clearly faster."""
    axes = _exchangeable(region, run)
    last = region.rows + region.inner - 1
    costs = {axis: _cost(run, axis) for axis in axes}
    best = min(costs, key=costs.__getitem__, default=last)
    if best == last or costs[best] > _CLEARLY * costs[last]:
        return region, run
    return _reordered(region, run, [*(axis for axis in range(last + 1) if axis != best), best])


def _exchangeable(region: Region, run: RegionRun[Number]) -> range:
    """The axes that can be the last one: all of a region that reduces nothing, otherwise those of a row."""
    if any(store.target is not None for store in region.stores):
        return range(0)
    reduces = region.columns or any(isinstance(node, Reduce) for node in region.nodes)
    # Stores write each point once, at a place of its own.
    is_pointwise = not reduces and all(0 not in place.strides for place in run.stores)
    return range(0 if is_pointwise else region.rows, region.rows + region.inner)


def _cost(run: RegionRun[Number], axis: int) -> float:
    """The estimated nanoseconds with an axis as the last one."""
    sizes = [value_of(size) for size in run.sizes]
    rows = 1
    for other, size in enumerate(sizes):
        rows *= 1 if other == axis else size
    strides = [value_of(place.strides[axis]) for place in (*run.loads, *run.stores)]
    vector = _VECTOR + sum(_VECTOR if abs(stride) == 1 else _APART for stride in strides if stride)
    return rows * (_ROW + -(-sizes[axis] // _LANES) * vector)


def _reordered(region: Region, run: RegionRun[Number], order: list[int]) -> tuple[Region, RegionRun[Number]]:
    new = {old: position for position, old in enumerate(order)}
    groups = run.loads, run.stores, run.columns
    loads, stores, columns = (tuple(_place(place, order) for place in places) for places in groups)
    of_load = iter(loads)
    nodes = tuple(_node(region, node, new, of_load) for node in region.nodes)
    reordered = replace(
        region,
        nodes=nodes,
        stores=_written(region, region.stores, stores),
        columns=_written(region, region.columns, columns),
    )
    check(reordered)
    sizes = tuple(run.sizes[axis] for axis in order)
    return reordered, replace(run, sizes=sizes, loads=loads, stores=stores, columns=columns)


def _node(region: Region, node: Node, new: Mapping[int, int], places: Iterator[Place[Number]]) -> Node:
    if isinstance(node, Index):
        return replace(node, axis=new[node.axis])
    if isinstance(node, Load):
        return replace(node, access=_access(region, node.access, next(places)))
    return node


def _written(region: Region, written: Sequence[_Written], places: Sequence[Place[Number]]) -> tuple[_Written, ...]:
    pairs = zip(written, places, strict=True)
    return tuple(replace(one, access=_access(region, one.access, place)) for one, place in pairs)


def _place(place: Place[Number], order: Sequence[int]) -> Place[Number]:
    return replace(place, strides=tuple(place.strides[axis] for axis in order))


def _access(region: Region, access: Access, place: Place[Number]) -> Access:
    *others, last = place.strides[region.rows :]
    kinds = [BROADCAST if stride == 0 else STRIDED for stride in others]
    of_last = BROADCAST if last == 0 else CONTIGUOUS if last == 1 else STRIDED
    return replace(access, inner="".join([*kinds, of_last]))
