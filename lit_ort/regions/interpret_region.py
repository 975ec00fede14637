"""Runs regions by torch, element addresses and all: the reference of their code, slow and short."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lit_ort.regions.element_types import MEMORY_DTYPES, is_float
from lit_ort.regions.pointwise_table import OPERATORS
from lit_ort.regions.region import LONG_SUM, Apply, Index, Literal, Load, Node, Reduce, Region, Scalar
from lit_ort.regions.region_run import Place, RegionRun, check_run


def interpret(
    region: Region, run: RegionRun[int], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Run a region, writing to the outputs.

    Raises:
        ValueError: the arguments aren't those of the region, or an operator doesn't accept a value.
        IndexError: an index is outside of its size.
    """
    check_run(region, run)
    values: list[torch.Tensor] = []
    places = iter(run.loads)
    for number, node in enumerate(region.nodes):
        if isinstance(node, Load):
            sizes = _sizes(region, run, is_full=region.full[number])
            values.append(_loaded(sizes, node, next(places), values, inputs[node.access.tensor]))
        else:
            values.append(_value(region, run, node, values))
    for store, place in zip(region.stores, run.stores, strict=True):
        indices = [values[index] for index in store.indices]
        address, valid = _addresses(_sizes(region, run, is_full=store.access.is_full), place, indices)
        if valid is not None and not valid.all():
            raise IndexError(_out_of_range(indices, place, torch.tensor(True)))
        if store.target is not None:
            start = None if store.start is None else inputs[store.start]
            _fill(outputs[store.access.tensor], (*(1,) * region.rows, *run.sizes[region.rows :]), place, start)
        _write(outputs[store.access.tensor], address, values[store.value], add=store.target is not None)
    for column, place in zip(region.columns, run.columns, strict=True):
        sizes = _sizes(region, run, is_full=region.full[column.value])
        total = reduced(column.kind, values[column.value].expand(sizes), range(region.rows))
        address, _ = _addresses((*(1,) * region.rows, *sizes[region.rows :]), place, [])
        _write(outputs[column.access.tensor], address, total, add=False)


def _sizes(region: Region, run: RegionRun[int], *, is_full: bool) -> tuple[int, ...]:
    """The shape of full values, or of row-level ones."""
    return run.sizes if is_full else (*run.sizes[: region.rows], *(1,) * region.inner)


def _write(output: torch.Tensor, address: torch.Tensor, value: torch.Tensor, *, add: bool) -> None:
    address, value = torch.broadcast_tensors(address, value.to(output.dtype))
    _flat(output).index_put_((int(output.storage_offset()) + address,), value, accumulate=add)


def _fill(output: torch.Tensor, sizes: tuple[int, ...], place: Place[int], start: torch.Tensor | None) -> None:
    """Sets what an index can select to 0, or to the elements of another tensor."""
    ((stride, size),) = place.indices
    address, _ = _addresses(sizes, Place(place.offset, place.strides), [])
    for row in range(size):
        at = address + row * stride
        value = torch.zeros((), dtype=output.dtype) if start is None else _flat(start)[int(start.storage_offset()) + at]
        _write(output, at, value, add=False)


def _value(region: Region, run: RegionRun[int], node: Node, values: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = MEMORY_DTYPES[node.dtype]
    if isinstance(node, Literal):
        return torch.tensor(node.value, dtype=dtype)
    if isinstance(node, Scalar):
        return torch.tensor(run.scalars[node.position]).to(dtype)
    if isinstance(node, Index):
        return _along(run.sizes, node.axis)
    if isinstance(node, Apply):
        arguments = [values[arg] for arg in node.args]
        return arguments[0].to(dtype) if node.operator == "cast" else OPERATORS[node.operator].reference(*arguments)
    assert isinstance(node, Reduce)
    inner = range(region.rows, region.rows + region.inner)
    return reduced(node.kind, values[node.arg].expand(run.sizes), inner)


def _loaded(
    sizes: tuple[int, ...], node: Load, place: Place[int], values: Sequence[torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor:
    address, valid = _addresses(sizes, place, [values[index] for index in node.indices])
    mask = torch.tensor(True) if node.mask is None else values[node.mask]
    if valid is not None and not (valid | ~mask).all():
        raise IndexError(_out_of_range([values[index] for index in node.indices], place, mask))
    address, mask = torch.broadcast_tensors(address, mask)
    flat = _flat(tensor)
    if not mask.any():
        return torch.zeros(address.shape, dtype=MEMORY_DTYPES[node.dtype])
    value = flat[torch.where(mask, int(tensor.storage_offset()) + address, 0)]
    return torch.where(mask, value, torch.zeros((), dtype=value.dtype)).to(MEMORY_DTYPES[node.dtype])


def _along(sizes: Sequence[int], axis: int) -> torch.Tensor:
    """The index along an axis, of a shape that broadcasts."""
    shape = [1] * len(sizes)
    shape[axis] = sizes[axis]
    return torch.arange(sizes[axis]).view(shape)


def _addresses(
    sizes: tuple[int, ...], place: Place[int], indices: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The element of each point, and whether its indices are within their sizes."""
    address = torch.full(sizes, place.offset)
    for axis, stride in enumerate(place.strides):
        address = address + _along(sizes, axis) * stride
    valid: torch.Tensor | None = None
    for index, (stride, size) in zip(indices, place.indices, strict=True):
        inside = ((index >= 0) & (index < size)).expand(sizes)
        valid = inside if valid is None else valid & inside
        address = address + torch.where(inside, index, 0) * stride
    return address, valid


def _out_of_range(indices: Sequence[torch.Tensor], place: Place[int], mask: torch.Tensor) -> str:
    for index, (_, size) in zip(indices, place.indices, strict=True):
        index, active = torch.broadcast_tensors(index, mask)
        wrong = index[active & ((index < 0) | (index >= size))]
        if wrong.numel():
            return f"index {int(wrong[0])} is out of range: it selects from {size}, so indices must be 0 to {size - 1}"
    raise AssertionError("all indices are in range")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage as one dimension."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def identity_of(kind: str, dtype: str) -> float | int | bool:
    """What a reduction of nothing is."""
    if dtype == "bool":
        return kind in ("all", "min", "prod")
    if kind in ("sum", LONG_SUM, "prod"):
        return int(kind == "prod")
    if is_float(dtype):
        return -math.inf if kind == "max" else math.inf
    limits = torch.iinfo(MEMORY_DTYPES[dtype])
    return limits.min if kind == "max" else limits.max


def reduced(kind: str, value: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """The reduction over axes, which stay with size 1."""
    if not len(axes):
        return value
    shape = [1 if axis in axes else size for axis, size in enumerate(value.shape)]
    if any(value.shape[axis] == 0 for axis in axes):
        name = str(value.dtype).removeprefix("torch.")
        return torch.full(shape, identity_of(kind, name), dtype=value.dtype)
    if kind == "prod":
        for axis in axes:
            value = value.prod(axis, keepdim=True, dtype=value.dtype)
        return value
    if kind == LONG_SUM:
        return value.sum(tuple(axes), keepdim=True, dtype=torch.float64).to(value.dtype)
    function = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "any": torch.any, "all": torch.all}[kind]
    if kind == "sum":
        return torch.sum(value, tuple(axes), keepdim=True, dtype=value.dtype)
    return function(value, tuple(axes), keepdim=True)
