"""Regions of torch nodes as functions: machine code, made when a session is created."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lit_ort.errors import KernelError
from lit_ort.ops.region_operator import REGION_NAME, laid_out
from lit_ort.regions.element_types import MEMORY_DTYPES
from lit_ort.regions.interpret_region import interpret
from lit_ort.regions.placed_region import PlacedRegion, SizedRegion, from_json, with_sizes
from lit_ort.runtime.buffers import SMALL_BYTES, BufferPool
from lit_ort.runtime.program import TorchNode

if TYPE_CHECKING:
    from lit_ort.kernels.kernel_calls import BoundKernel, Kernel, KernelCache

RegionFunction = Callable[[BufferPool, Sequence[torch.Tensor], Sequence[int]], Sequence[torch.Tensor]]
# The sizes of as many calls are remembered.
_MOST_SIZES = 64


@functools.cache
def kernels() -> KernelCache:
    """The kernels of this process.

    Raises:
        KernelError: there is no code for this CPU, or llvmlite is not installed.
    """
    try:
        from lit_ort.kernels.kernel_calls import KernelCache  # loads LLVM
    except ImportError as error:
        raise KernelError(f"llvmlite can't be imported ({error}). Install it: pip install llvmlite.") from error
    return KernelCache()


def why_no_kernels() -> str | None:
    """Why this process can't run regions; None if it can."""
    try:
        kernels()
    except KernelError as error:
        return str(error)
    return None


def region_functions(nodes: Iterable[TorchNode]) -> Mapping[str, RegionFunction]:
    """The function of each region that torch nodes call, by its text; all are compiled together.

    Raises:
        KernelError: there is no code for this CPU.
        ValueError: a text is not that of a region.
    """
    texts = {s.args[1]: s.args[2] for node in nodes for s in node.statements if s.target == REGION_NAME}
    if not texts:
        return {}
    placed = [from_json(text) for text in texts]
    made = kernels().kernels(one.region for one in placed)
    return {
        text: _function(one, kernel, bool(texts[text])) for text, one, kernel in zip(texts, placed, made, strict=True)
    }


def _function(placed: SizedRegion, kernel: Kernel, has_sizes: bool) -> RegionFunction:
    sized = kernel.sized(placed.run)
    made = functools.lru_cache(_MOST_SIZES)(lambda sizes: _of_sizes(with_sizes(placed, sizes), sized.bind(sizes)))
    if not has_sizes:
        only = made(())
        return lambda pool, tensors, _: only(pool, tensors)
    return lambda pool, tensors, sizes: made(tuple(sizes))(pool, tensors)


def _of_sizes(
    placed: PlacedRegion[int], bound: BoundKernel
) -> Callable[[BufferPool, Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    outputs = zip(placed.outputs, placed.region.outputs, strict=True)
    makers = [_maker(shape, MEMORY_DTYPES[dtype]) for shape, dtype in outputs]
    dtypes = [MEMORY_DTYPES[dtype] for dtype in placed.region.inputs]
    is_plain = all(layout.strides is None for layout in placed.inputs)
    checked: list[bool] = []

    def call(pool: BufferPool, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not checked:
            checked.append(_are_as_traced(placed, tensors, dtypes) and is_plain)
        if checked[0]:
            given = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
        else:
            typed = (tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True))
            given = [laid_out(tensor, layout) for tensor, layout in zip(typed, placed.inputs, strict=True)]
        results = [make(pool) for make in makers]
        try:
            bound(*given, *results)
        except (IndexError, ValueError):
            # The reference says which index or value.
            interpret(placed.region, placed.run, given, results)
            raise
        return results

    return call


def _are_as_traced(placed: PlacedRegion[int], tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether tensors have the dtypes of the trace, which a few operators of torch declare wrongly.

    Raises:
        ValueError: their sizes aren't those of the trace.
    """
    for tensor, layout in zip(tensors, placed.inputs, strict=True):
        if tensor.numel() != math.prod(layout.shape):
            raise ValueError(f"a region reads a value of sizes {tuple(tensor.shape)} as one of {layout.shape}")
    return [tensor.dtype for tensor in tensors] == list(dtypes)


def _maker(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[BufferPool], torch.Tensor]:
    if torch.Size(shape).numel() * dtype.itemsize < SMALL_BYTES:
        return lambda _: torch.empty(shape, dtype=dtype)
    return lambda pool: pool.empty(*shape, dtype=dtype)
