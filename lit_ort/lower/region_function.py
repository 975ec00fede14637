"""Writes a region as a model-local ONNX function of standard operators: what `dump_dir` shows of native sessions.

Values have the dimensions of the region's space, of size 1 along axes that they don't depend on. The elements of a
load are a reshape, a slice and a transposition of its input where they can be; others are gathered by their addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from lit_ort.lower.memory_steps import MemorySteps, memory_steps
from lit_ort.lower.onnx_values import FunctionNodes, OnnxValue
from lit_ort.regions.element_types import MEMORY_DTYPES, computed_in
from lit_ort.regions.placed_region import PlacedRegion
from lit_ort.regions.pointwise_table import OPERATORS
from lit_ort.regions.region import LONG_SUM, Apply, ColumnReduction, Index, Literal, Load, Node, Reduce, Scalar, Store
from lit_ort.regions.region_run import Place
from lit_ort.regions.symbolic_size import Number, Size, product
from lit_ort.runtime.elements import ELEMENTS

# The input of a function with the sizes that only a run tells.
SIZES = "sizes"
_REDUCTIONS = {"sum": "ReduceSum", LONG_SUM: "ReduceSum", "prod": "ReduceProd", "max": "ReduceMax", "min": "ReduceMin"}
_REDUCTIONS |= {"any": "ReduceMax", "all": "ReduceMin"}
# The formulas of these are of bits.
_ROUNDED = {"round_to_bfloat16": onnx.TensorProto.BFLOAT16, "round_to_float16": onnx.TensorProto.FLOAT16}


def region_function(
    placed: PlacedRegion[Number], shapes: Sequence[Sequence[Number]], name: str
) -> tuple[onnx.FunctionProto, list[Size]]:
    """The function of a region.

    Args:
        placed: the region.
        shapes: of the values that it is called with, whose elements are those of its inputs in their order of memory.
        name: of the function.

    Returns:
        the function, and the sizes that it takes as its last input, a vector; without sizes, there is no such input.
    """
    return _RegionNodes(placed, shapes).function(name)


@dataclass(frozen=True)
class _Write:
    """What is written to an output, or added by indices: a value that has these axes, at a place."""

    value: OnnxValue
    axes: frozenset[int]
    place: Place[Number]
    indices: tuple[int, ...] = ()


class _RegionNodes:
    """The nodes of one region's function."""

    def __init__(self, placed: PlacedRegion[Number], shapes: Sequence[Sequence[Number]]) -> None:
        self._region, self._run, self._placed = placed.region, placed.run, placed
        self._nodes = FunctionNodes()
        self._shapes = shapes
        self._sizes: list[Size] = []
        self._values: list[OnnxValue] = []
        # The axes that each value depends on.
        self._axes: list[frozenset[int]] = []
        self._rank = self._region.rows + self._region.inner

    def function(self, name: str) -> tuple[onnx.FunctionProto, list[Size]]:
        region, places = self._region, iter(self._run.loads)
        for number, node in enumerate(region.nodes):
            value, axes = self._loaded(node, next(places)) if isinstance(node, Load) else self._computed(number, node)
            self._values.append(value)
            self._axes.append(axes)
        outputs = [self._output(tensor) for tensor in range(len(region.outputs))]
        inputs = [_input(tensor) for tensor in range(len(region.inputs))]
        inputs += [SIZES] if self._sizes else []
        return self._nodes.function(name, inputs, outputs, str(region)), self._sizes

    # Numbers

    def _vector(self, numbers: Sequence[Number]) -> str:
        """An int64 vector of numbers, some of which may be sizes of a run."""
        fixed = [number for number in numbers if isinstance(number, int)]
        if len(fixed) == len(numbers):
            return self._nodes.integers(fixed)
        parts = [self._size(n) if isinstance(n, Size) else self._nodes.integers([n]) for n in numbers]
        return parts[0] if len(parts) == 1 else self._nodes.op("Concat", *parts, axis=0)

    def _size(self, size: Size, *, as_scalar: bool = False) -> str:
        if size not in self._sizes:
            self._sizes.append(size)
        position = np.array(self._sizes.index(size), dtype=np.int64)
        return self._nodes.op("Gather", SIZES, self._nodes.constant(position if as_scalar else position[None]))

    def _scalar(self, number: Number) -> str:
        return (
            self._size(number, as_scalar=True) if isinstance(number, Size) else self._nodes.number(number, "int64").name
        )

    # Shapes

    def _shape(self, axes: frozenset[int]) -> list[Number]:
        """The shape of a value that depends on these axes."""
        return [size if axis in axes else 1 for axis, size in enumerate(self._run.sizes)]

    def _reshaped(self, value: OnnxValue, shape: Sequence[Number], old: Sequence[Number] | None = None) -> OnnxValue:
        if old is not None and tuple(old) == tuple(shape):
            return value
        return self._made("Reshape", value, self._vector(shape))

    def _expanded(self, number: int, axes: frozenset[int]) -> OnnxValue:
        """A node's value with these axes too."""
        value, missing = self._values[number], axes - self._axes[number]
        return self._made("Expand", value, self._vector(self._shape(axes))) if missing else value

    def _made(self, operator: str, value: OnnxValue, *inputs: str, **attributes: Any) -> OnnxValue:
        return OnnxValue(self._nodes, self._nodes.op(operator, value.name, *inputs, **attributes), value.dtype)

    def _along(self, axis: int, stride: Number = 1) -> OnnxValue:
        """index · stride along an axis."""
        size = self._run.sizes[axis]
        ends = self._scalar(0), self._scalar(size * stride), self._scalar(stride)
        numbers = OnnxValue(self._nodes, self._nodes.op("Range", *ends), "int64")
        return self._reshaped(numbers, self._shape(frozenset([axis])))

    def _axes_of(self, place: Place[Number]) -> list[int]:
        """The axes along which a place has different elements."""
        return sorted(self._every(axis for axis, stride in enumerate(place.strides) if stride != 0))

    # Nodes

    def _computed(self, number: int, node: Node) -> tuple[OnnxValue, frozenset[int]]:
        if isinstance(node, Literal):
            return self._nodes.number(node.value, node.dtype, self._rank), frozenset()
        if isinstance(node, Scalar):
            return self._scalar_of_run(self._run.scalars[node.position], node.dtype), frozenset()
        if isinstance(node, Index):
            return self._along(node.axis), self._every([node.axis])
        if isinstance(node, Apply):
            return self._applied(node), frozenset().union(*(self._axes[arg] for arg in node.args))
        assert isinstance(node, Reduce)
        inner = range(self._region.rows, self._rank)
        needed = self._axes[node.arg] | self._every(inner)
        return self._reduced(node.kind, self._expanded(node.arg, needed), inner), needed.difference(inner)

    def _scalar_of_run(self, number: float | Number, dtype: str) -> OnnxValue:
        if not isinstance(number, Size):
            return self._nodes.number(number, dtype, self._rank)
        value = OnnxValue(self._nodes, self._vector([number]), "int64")
        return self._reshaped(value, [1] * self._rank, [1]).cast(dtype)

    def _every(self, axes: Iterable[int]) -> frozenset[int]:
        """Those of the axes that have several indices."""
        return frozenset(axis for axis in axes if self._run.sizes[axis] != 1)

    def _applied(self, node: Apply) -> OnnxValue:
        first, *others = (self._values[arg] for arg in node.args)
        if node.operator == "cast":
            return first.cast(node.dtype)
        if node.operator in _ROUNDED:
            return self._made("Cast", self._made("Cast", first, to=_ROUNDED[node.operator]), to=onnx.TensorProto.FLOAT)
        return OPERATORS[node.operator].formula(first, *others)

    def _reduced(self, kind: str, value: OnnxValue, axes: Sequence[int]) -> OnnxValue:
        """The reduction over axes, which stay with size 1; of a value without dimensions, itself."""
        return value.reduce(_REDUCTIONS[kind], self._nodes.integers(axes)) if len(axes) else value

    # Loads

    def _memory(self, tensor: int, dtype: str, shape: Sequence[Number]) -> OnnxValue:
        """An input with other dimensions over its elements."""
        value = OnnxValue(self._nodes, _input(tensor), dtype)
        return self._reshaped(value, shape, self._shapes[tensor])

    def _loaded(self, node: Load, place: Place[Number]) -> tuple[OnnxValue, frozenset[int]]:
        access, axes = node.access, self._axes_of(place)
        count = product(self._shapes[access.tensor])
        found = None
        depends = frozenset(axes).union(*(self._axes[index] for index in node.indices))
        if not node.indices and node.mask is None:
            steps = memory_steps(count, [(self._run.sizes[a], place.strides[a]) for a in axes], place.offset)
            found = None if steps is None else self._viewed(access.tensor, access.dtype, axes, steps)
        elif node.mask is None:
            found = self._rows(node, place, axes, count)
        if found is None:
            found = self._gathered(node, place, count)
            depends |= frozenset() if node.mask is None else self._axes[node.mask]
        return found.cast(node.dtype), depends

    def _viewed(self, tensor: int, dtype: str, axes: Sequence[int], steps: MemorySteps) -> OnnxValue:
        shape = self._shape(frozenset(axes))
        if steps.is_whole and list(steps.order) == sorted(steps.order):
            return self._memory(tensor, dtype, shape)
        value = self._memory(tensor, dtype, steps.shape)
        if not steps.is_whole:
            cut = [k for k in range(len(steps.shape)) if steps.sizes[k] != steps.shape[k]]
            starts = [steps.starts[k] for k in cut]
            ends = [steps.starts[k] + steps.sizes[k] for k in cut]
            value = self._made("Slice", value, self._vector(starts), self._vector(ends), self._nodes.integers(cut))
        rest = range(len(steps.order), len(steps.shape))
        order = [*np.argsort(steps.order).tolist(), *rest]
        if order != sorted(order):
            value = self._made("Transpose", value, perm=order)
        return self._reshaped(value, shape, [*(self._run.sizes[a] for a in axes), *(1 for _ in rest)])

    def _rows(self, node: Load, place: Place[Number], axes: Sequence[int], count: Number) -> OnnxValue | None:
        """Whole rows of a table, as an embedding's; None if a load is no such."""
        if len(node.indices) != 1:
            return None
        (index,), ((stride, size),) = node.indices, place.indices
        of_index = sorted(self._axes[index])
        if not (of_index and axes and of_index[-1] < axes[0]) or stride * size != count:
            return None
        steps = memory_steps(stride, [(self._run.sizes[a], place.strides[a]) for a in axes], place.offset)
        if steps is None or not steps.is_whole or list(steps.order) != sorted(steps.order):
            return None
        access = node.access
        table = self._memory(access.tensor, access.dtype, [size, *(self._run.sizes[a] for a in axes)])
        rows = self._reshaped(
            self._values[index], [self._run.sizes[a] for a in of_index], self._shape(self._axes[index])
        )
        both = [*of_index, *axes]
        shape = [self._run.sizes[a] for a in both]
        return self._reshaped(self._made("Gather", table, rows.name), self._shape(frozenset(both)), shape)

    def _gathered(self, node: Load, place: Place[Number], count: Number) -> OnnxValue:
        address, access = self._address(place, node.indices), node.access
        mask = None if node.mask is None else self._values[node.mask]
        if mask is not None:
            address = mask.where(address, 0)
        value = self._made("Gather", self._memory(access.tensor, access.dtype, [count]), address.name).cast(node.dtype)
        return value if mask is None else mask.where(value, 0)

    def _address(self, place: Place[Number], indices: Sequence[int]) -> OnnxValue:
        """The element of each point, in a shape that broadcasts."""
        address = None
        parts = [self._along(axis, place.strides[axis]) for axis in self._axes_of(place)]
        for index, (stride, _) in zip(indices, place.indices, strict=True):
            number = self._values[index]
            parts.append(number if stride == 1 else number * OnnxValue(self._nodes, self._scalar(stride), "int64"))
        for part in parts:
            address = part if address is None else address + part
        offset = OnnxValue(self._nodes, self._scalar(place.offset), "int64")
        if address is None:
            return self._reshaped(offset, [1] * self._rank)
        return address if place.offset == 0 else address + offset

    # Outputs

    def _output(self, tensor: int) -> str:
        """Writes an output and returns its name."""
        region, run = self._region, self._run
        stores = [pair for pair in zip(region.stores, run.stores, strict=True) if pair[0].access.tensor == tensor]
        columns = [pair for pair in zip(region.columns, run.columns, strict=True) if pair[0].access.tensor == tensor]
        writes = [*(self._store(*pair) for pair in stores), *(self._column(*pair) for pair in columns)]
        start = next((store.start for store, _ in stores if store.start is not None), None)
        dtype, shape = region.outputs[tensor], self._placed.outputs[tensor]
        found = self._whole(writes[0], shape) if len(writes) == 1 and start is None else None
        if found is None:
            found = self._written(writes, start, dtype, shape)
        self._nodes.op("Cast" if found.dtype != dtype else "Identity", found.name, **_to(found.dtype, dtype))
        node = self._nodes.nodes[-1]
        node.output[0] = node.name = f"out{tensor}"
        return node.output[0]

    def _store(self, store: Store, place: Place[Number]) -> _Write:
        points = self._every(range(self._rank if store.access.is_full else self._region.rows))
        axes = frozenset(self._axes_of(place)) if store.target is None else points
        return _Write(self._expanded(store.value, axes), axes, place, store.indices)

    def _column(self, column: ColumnReduction, place: Place[Number]) -> _Write:
        rows = range(self._region.rows)
        strides = (*(0 for _ in rows), *place.strides[self._region.rows :])
        place = replace(place, strides=strides)
        axes = frozenset(self._axes_of(place))
        value = self._expanded(column.value, self._axes[column.value] | self._every(rows) | axes)
        return _Write(self._reduced(column.kind, value, rows), axes, place)

    def _whole(self, write: _Write, shape: Sequence[Number]) -> OnnxValue | None:
        """A value that is written to every element of its output; None if it isn't."""
        axes, place, value = sorted(write.axes), write.place, write.value
        steps = memory_steps(product(shape), [(self._run.sizes[a], place.strides[a]) for a in axes], place.offset)
        if write.indices or steps is None or not steps.is_whole:
            return None
        if list(steps.order) == sorted(steps.order):
            return self._reshaped(value, shape, self._shape(write.axes))
        rest = [axis for axis in range(self._rank) if axis not in write.axes]
        value = self._made("Transpose", value, perm=[*(axes[k] for k in steps.order), *rest])
        return self._reshaped(value, shape)

    def _written(self, writes: Sequence[_Write], start: int | None, dtype: str, shape: Sequence[Number]) -> OnnxValue:
        """Values that are written to some elements each, or added to them."""
        count, computed = product(shape), computed_in(dtype)
        if start is None:
            zero = onnx.helper.make_tensor("zero", ELEMENTS[MEMORY_DTYPES[computed]], [1], [0])
            name = self._nodes.op("ConstantOfShape", self._vector([count]), value=zero)
            memory = OnnxValue(self._nodes, name, computed)
        else:
            memory = self._memory(start, dtype, [count]).cast(computed)
        for write in writes:
            grid = self._vector(self._shape(write.axes))
            address, value = self._address(write.place, write.indices), write.value.cast(computed)
            parts = [self._reshaped(self._made("Expand", part, grid), [-1]) for part in (address, value)]
            memory = memory.scattered(*parts, add=bool(write.indices))
        return self._reshaped(memory, shape)


def _input(tensor: int) -> str:
    return f"in{tensor}"


def _to(dtype: str, target: str) -> dict[str, Any]:
    return {} if dtype == target else {"to": ELEMENTS[MEMORY_DTYPES[target]]}
