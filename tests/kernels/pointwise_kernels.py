"""Runs one operator of the table on vectors of elements."""

from __future__ import annotations

import torch

from lit_ort.kernels.kernel_calls import KernelCache
from lit_ort.regions.element_types import MEMORY_DTYPES, computed_in, name_of
from lit_ort.regions.pointwise_table import OPERATORS, result_dtype
from lit_ort.regions.region import Apply
from lit_ort.regions.region_builder import RegionBuilder
from lit_ort.regions.region_run import Place, RegionRun


def pointwise(kernels: KernelCache, name: str, *arguments: torch.Tensor) -> torch.Tensor:
    """The operator on tensors of one dimension, computed by a kernel."""
    builder = RegionBuilder(0, 1)
    dtypes = [name_of(argument.dtype) or "" for argument in arguments]
    loads = tuple(builder.load(number, dtype, "1") for number, dtype in enumerate(dtypes))
    dtype = result_dtype(OPERATORS[name], tuple(computed_in(dtype) for dtype in dtypes))
    node = builder.add(Apply(name, loads, dtype))
    builder.store(0, dtype, "1", node)
    return _run(kernels, builder, arguments, dtype)


def cast_to(kernels: KernelCache, argument: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    builder = RegionBuilder(0, 1)
    target = name_of(dtype) or ""
    node = builder.load(0, name_of(argument.dtype) or "", "1")
    builder.store(0, target, "1", builder.cast(node, computed_in(target)))
    return _run(kernels, builder, (argument,), target)


def _run(kernels: KernelCache, builder: RegionBuilder, arguments: tuple[torch.Tensor, ...], dtype: str) -> torch.Tensor:
    size = arguments[0].numel()
    result = torch.empty(size, dtype=MEMORY_DTYPES[dtype])
    place = Place(0, (1,))
    run = RegionRun((size,), (place,) * len(arguments), (place,))
    kernels.kernel(builder.region()).bind(run)(*arguments, result)
    return result


def ulps(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The distance in units in the last place of the result's dtype; where both are equal or NaN it is 0."""
    info = torch.finfo(result.dtype)
    smallest = info.smallest_normal * info.eps
    size = exact.abs().double().clamp(info.smallest_normal, info.max)
    unit = (torch.exp2(torch.floor(torch.log2(size))) * info.eps).clamp_min(smallest)
    distance = (result.double() - exact.double()).abs() / unit
    rounded = exact.to(result.dtype)
    same = (result == rounded) | (result.isnan() & rounded.isnan())
    return torch.where(same, 0.0, torch.where(distance.isnan(), torch.inf, distance))


def steps(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The number of float32 values from a result to the rounded exact value: cheaper than `ulps`, and at most ½ off."""
    rounded = exact.float()
    first, second = (_ordered(value.view(torch.int32)) for value in (result, rounded))
    distance = first.sub_(second).abs_()
    return distance.masked_fill_(result.isnan() & rounded.isnan(), 0)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats with these bits; both zeros are 0."""
    wide = bits.long()
    return torch.where(wide < 0, -(1 << 31) - wide, wide)
