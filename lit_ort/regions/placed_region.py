"""A region with the arguments of its runs and the layouts of its tensors, as plain data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from lit_ort.regions.element_types import MEMORY_DTYPES
from lit_ort.regions.region import Region
from lit_ort.regions.region_run import Place, RegionRun, check_run


@dataclass(frozen=True)
class TensorLayout:
    """The sizes and strides of a tensor; without strides, its elements are neighbours in their order."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PlacedRegion:
    """A region, the arguments of its runs and its tensors.

    Args:
        region: what is computed.
        run: its arguments.
        inputs: the layout of each input.
        outputs: the shape of each output.
    """

    region: Region
    run: RegionRun
    inputs: tuple[TensorLayout, ...]
    outputs: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"sizes {self.run.sizes}\n{self.region}"

    def to_json(self) -> str:
        run = {part.name: getattr(self.run, part.name) for part in fields(RegionRun)}
        for name in ("loads", "stores", "columns"):
            run[name] = [[place.offset, place.strides, place.indices] for place in run[name]]
        inputs = [[layout.shape, layout.strides] for layout in self.inputs]
        data = {"region": json.loads(self.region.to_json()), "run": run, "inputs": inputs, "outputs": self.outputs}
        return json.dumps(data, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> PlacedRegion:
        """The region of `to_json`.

        Raises:
            ValueError: the text is not that of a region, or its arguments are not valid.
        """
        try:
            data = json.loads(text)
            region = Region.from_json(json.dumps(data["region"]))
            run = dict(data["run"])
            for name in ("loads", "stores", "columns"):
                run[name] = tuple(_place(*place) for place in run[name])
            run["sizes"], run["scalars"] = _integers(run["sizes"]), tuple(run["scalars"])
            inputs = tuple(_layout(*layout) for layout in data["inputs"])
            placed = PlacedRegion(region, RegionRun(**run), inputs, tuple(map(_integers, data["outputs"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"This is not the text of a placed region ({error!r}).") from error
        if (len(placed.inputs), len(placed.outputs)) != (len(region.inputs), len(region.outputs)):
            raise ValueError(f"{len(inputs)} inputs and {len(placed.outputs)} outputs aren't those of the region.")
        if not {*region.inputs, *region.outputs} <= set(MEMORY_DTYPES):
            raise ValueError(f"The dtypes {region.inputs} and {region.outputs} aren't all known.")
        check_run(region, placed.run)
        return placed


def _layout(shape: Sequence[int], strides: Sequence[int] | None) -> TensorLayout:
    return TensorLayout(_integers(shape), None if strides is None else _integers(strides))


def _place(offset: int, strides: Sequence[int], indices: Sequence[Sequence[int]]) -> Place:
    (offset,) = _integers([offset])
    return Place(offset, _integers(strides), tuple((stride, size) for stride, size in map(_integers, indices)))


def _integers(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise TypeError(f"{values} are no integers")
    return tuple(values)
