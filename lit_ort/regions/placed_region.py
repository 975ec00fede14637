"""A region with the arguments of its runs and the layouts of its tensors, as plain data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic

from lit_ort.regions.element_types import MEMORY_DTYPES
from lit_ort.regions.region import Region
from lit_ort.regions.region_run import M, N, Place, RegionRun, check_run


@dataclass(frozen=True)
class SizeArgument:
    """A number that a call of the region gives, by its position."""

    position: int


@dataclass(frozen=True)
class TensorLayout(Generic[N]):
    """The sizes and strides of a tensor; without strides, its elements are neighbours in their order."""

    shape: tuple[N, ...]
    strides: tuple[N, ...] | None = None

    def map(self, function: Callable[[N], M]) -> TensorLayout[M]:
        """The layout with other numbers."""
        strides = None if self.strides is None else tuple(map(function, self.strides))
        return TensorLayout(tuple(map(function, self.shape)), strides)


@dataclass(frozen=True)
class PlacedRegion(Generic[N]):
    """A region, the arguments of its runs and its tensors.

    Args:
        region: what is computed.
        run: its arguments.
        inputs: the layout of each input.
        outputs: the shape of each output.
    """

    region: Region
    run: RegionRun[N]
    inputs: tuple[TensorLayout[N], ...]
    outputs: tuple[tuple[N, ...], ...]

    def __str__(self) -> str:
        sizes = ", ".join(f"size {n.position}" if isinstance(n, SizeArgument) else str(n) for n in self.run.sizes)
        return f"sizes ({sizes})\n{self.region}"

    def map(self, function: Callable[[N], M]) -> PlacedRegion[M]:
        """The region with other numbers."""
        inputs = tuple(layout.map(function) for layout in self.inputs)
        outputs = tuple(tuple(map(function, shape)) for shape in self.outputs)
        return PlacedRegion(self.region, self.run.map(function), inputs, outputs)


SizedRegion = PlacedRegion[int | SizeArgument]


def to_json(placed: SizedRegion) -> str:
    """The text of a region, its arguments and its tensors."""
    run = {part.name: getattr(placed.run, part.name) for part in fields(RegionRun)}
    for name in ("loads", "stores", "columns"):
        run[name] = [[place.offset, place.strides, place.indices] for place in run[name]]
    inputs = [[layout.shape, layout.strides] for layout in placed.inputs]
    data = {"region": json.loads(placed.region.to_json()), "run": run, "inputs": inputs, "outputs": placed.outputs}
    return json.dumps(data, separators=(",", ":"), default=lambda size: {"size": size.position})


def strides_of_inputs(text: str) -> list[list[Any] | None]:
    """For each input of the region of a text, its strides, as numbers or sizes; None if it is contiguous."""
    return [strides for _, strides in json.loads(text)["inputs"]]


def from_json(text: str) -> SizedRegion:
    """The region of a text.

    Raises:
        ValueError: the text is not that of a region.
    """
    try:
        data = json.loads(text)
        region = Region.from_json(json.dumps(data["region"]))
        run = dict(data["run"])
        for name in ("loads", "stores", "columns"):
            run[name] = tuple(_place(*place) for place in run[name])
        run["sizes"] = _numbers(run["sizes"])
        run["scalars"] = tuple(one if isinstance(one, float | bool) else _number(one) for one in run["scalars"])
        inputs = tuple(_layout(*layout) for layout in data["inputs"])
        placed = PlacedRegion(region, RegionRun(**run), inputs, tuple(map(_numbers, data["outputs"])))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"This is not the text of a placed region ({error!r}).") from error
    if (len(placed.inputs), len(placed.outputs)) != (len(region.inputs), len(region.outputs)):
        raise ValueError(f"{len(inputs)} inputs and {len(placed.outputs)} outputs aren't those of the region.")
    if not {*region.inputs, *region.outputs} <= set(MEMORY_DTYPES):
        raise ValueError(f"The dtypes {region.inputs} and {region.outputs} aren't all known.")
    return placed


def with_sizes(placed: SizedRegion, sizes: Sequence[int]) -> PlacedRegion[int]:
    """The region with the sizes of a call.

    Raises:
        ValueError: its arguments are not valid, or a size is missing.
    """
    try:
        sized = placed.map(functools.partial(_sized, sizes=sizes))
    except IndexError as error:
        raise ValueError(f"{len(sizes)} sizes are given to a region that has more: {placed}") from error
    check_run(sized.region, sized.run)
    return sized


def output_shapes(placed: SizedRegion, sizes: Sequence[int]) -> list[list[int]]:
    """The shapes of a region's outputs for the sizes of a call."""
    return [[_sized(number, sizes) for number in shape] for shape in placed.outputs]


def _sized(number: int | SizeArgument, sizes: Sequence[int]) -> int:
    return sizes[number.position] if isinstance(number, SizeArgument) else number


def _layout(shape: Sequence[Any], strides: Sequence[Any] | None) -> TensorLayout[int | SizeArgument]:
    return TensorLayout(_numbers(shape), None if strides is None else _numbers(strides))


def _place(offset: Any, strides: Sequence[Any], indices: Sequence[Sequence[Any]]) -> Place[int | SizeArgument]:
    pairs = tuple((_number(stride), _number(size)) for stride, size in indices)
    return Place(_number(offset), _numbers(strides), pairs)


def _numbers(values: Sequence[Any]) -> tuple[int | SizeArgument, ...]:
    return tuple(map(_number, values))


def _number(value: Any) -> int | SizeArgument:
    number = SizeArgument(value["size"]) if isinstance(value, dict) else value
    whole = number.position if isinstance(number, SizeArgument) else number
    if type(whole) is not int:
        raise TypeError(f"{value} is no integer")
    return number
