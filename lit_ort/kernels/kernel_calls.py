"""Kernels from regions, and their calls on torch tensors."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from weakref import WeakValueDictionary

import torch

from lit_ort._compat.openmp import find_openmp
from lit_ort.kernels.kernel_arguments import (
    BLOCK_FUNCTION,
    COLUMN_BLOCKS,
    COLUMNS,
    FINISH_FUNCTION,
    FLAGS,
    ROW_BLOCKS,
    ROWS,
    SCRATCH,
    TILE,
    WORD,
    Cut,
    Layout,
    array_bytes,
    scalars_of,
    words_of,
)
from lit_ort.kernels.machine_code import Cpu, MachineCode, host_cpu
from lit_ort.kernels.matmul_library import matmul_library
from lit_ort.kernels.region_text import write_region
from lit_ort.kernels.row_stages import scratch_arrays
from lit_ort.kernels.thread_pool import Runner
from lit_ort.kernels.vector_text import Text
from lit_ort.regions.placed_region import SizeArgument
from lit_ort.regions.region import Region
from lit_ort.regions.region_run import RegionRun, check_run

_NO_FLAGS = [0] * len(FLAGS)
_FLAGS = slice(FLAGS[0], FLAGS[0] + len(FLAGS))


@dataclass(frozen=True)
class Kernel:
    """The machine code of a region.

    Args:
        region: what it computes.
        block: the address of `void block(ptr arguments, i64 number)`.
        finish: the address of `void finish(ptr arguments)`, or 0 if there is nothing to do after the blocks.
        code: keeps the machine code alive.
        runner: computes all blocks.
    """

    region: Region
    block: int
    finish: int
    code: MachineCode
    runner: Runner

    def bind(self, run: RegionRun[int]) -> BoundKernel:
        """The kernel with its arguments apart from tensors.

        Raises:
            ValueError: the arguments aren't those of the region.
        """
        return self.sized(cast("RegionRun[int | SizeArgument]", run)).bind(())

    def sized(self, run: RegionRun[int | SizeArgument]) -> SizedKernel:
        """The kernel with arguments of which some are sizes of calls.

        Raises:
            ValueError: the arguments aren't those of the region, whatever the sizes.
        """
        return SizedKernel(self, run)


class FunctionLibrary:
    """Functions that kernels call, such as those of mathematics. Thread-safe.

    Args:
        cpu: what to make code for.
    """

    def __init__(self, cpu: Cpu) -> None:
        self._cpu, self._lock = cpu, threading.Lock()
        self._made: dict[str, tuple[int, MachineCode]] = {}

    def addresses(self, texts: Mapping[str, Text]) -> dict[str, int]:
        """The addresses of functions, by their names; those that are new are compiled."""
        with self._lock:
            names = [name for name in texts if name not in self._made]
            if names:
                new = [str(texts[name]) for name in names]
                # Each text declares what it needs.
                lines = dict.fromkeys(line for text in new for line in text.split("\n") if line.startswith("declare"))
                bodies = [
                    "\n".join(line for line in text.split("\n") if not line.startswith("declare")) for text in new
                ]
                code = MachineCode("\n".join((*lines, *bodies)), self._cpu)
                self._made.update({name: (code.address(name), code) for name in names})
            return {name: self._made[name][0] for name in texts}


class KernelCache:
    """Makes kernels; equal regions share one, as long as it is in use. Thread-safe.

    Args:
        cpu: what to make code for; by default, the CPU of this machine.

    Attributes:
        library: functions that kernels call.
        runner: computes the blocks of all kernels.
        matmuls: the functions of matmuls.
    """

    def __init__(self, cpu: Cpu | None = None) -> None:
        self.cpu = cpu or host_cpu()
        self._kernels: WeakValueDictionary[str, Kernel] = WeakValueDictionary()
        self._lock = threading.Lock()
        self.library = FunctionLibrary(self.cpu)
        self.runner = Runner(self.cpu, find_openmp())
        self.matmuls = matmul_library(self.cpu, self.runner)

    def __len__(self) -> int:
        return len(self._kernels)

    def kernel(self, region: Region) -> Kernel:
        """The kernel of a region."""
        return self.kernels([region])[0]

    def kernels(self, regions: Iterable[Region]) -> list[Kernel]:
        """The kernels of regions; those that are new are compiled together."""
        given = list(regions)
        with self._lock:
            made = {key: kernel for key in {one.key for one in given} if (kernel := self._kernels.get(key)) is not None}
            new = {region.key: region for region in given if region.key not in made}
            if new:
                made |= self._compile(new)
                self._kernels.update(made)
        return [made[region.key] for region in given]

    def _compile(self, regions: dict[str, Region]) -> dict[str, Kernel]:
        text = Text()
        for region in regions.values():
            write_region(text, region, self.cpu.vector_bytes)
        code = MachineCode(str(text), self.cpu, self.library.addresses(text.library))
        made = {}
        for key, region in regions.items():
            finish = code.address(f"finish.{key}") if region.columns else 0
            made[key] = Kernel(region, code.address(f"block.{key}"), finish, code, self.runner)
        return made


class SizedKernel:
    """A kernel with arguments of which some are sizes of calls; what no size changes is computed once.

    Args:
        kernel: the kernel.
        run: its arguments.

    Raises:
        ValueError: the arguments aren't those of the region, whatever the sizes.
    """

    def __init__(self, kernel: Kernel, run: RegionRun[int | SizeArgument]) -> None:
        region = kernel.region
        # No size of a call is a stride that the code knows, which are 0 and 1.
        check_run(region, run.map(lambda number: 2 if isinstance(number, SizeArgument) else number))
        self._kernel, self._layout, self._sizes = kernel, Layout(region), run.sizes
        self._cut, self._arrays = Cut(region), scratch_arrays(region)
        self._words = (ctypes.c_int64 * self._layout.words)()
        self._words[BLOCK_FUNCTION], self._words[FINISH_FUNCTION] = kernel.block, kernel.finish
        # Positions of words, with those of sizes of calls.
        self._sized, self._sized_scalars = list[tuple[int, int]](), list[tuple[int, int, bool]]()
        for position, number in words_of(self._layout, run):
            if isinstance(number, SizeArgument):
                self._sized.append((position, number.position))
            else:
                self._words[position] = number
        for position, value, is_float in scalars_of(self._layout, run):
            if isinstance(value, SizeArgument):
                self._sized_scalars.append((position, value.position, is_float))
            else:
                self._words[position] = _scalar_word(value, is_float)

    def bind(self, sizes: Sequence[int]) -> BoundKernel:
        """The kernel with its arguments for the sizes of a call."""
        words = type(self._words).from_buffer_copy(self._words)
        for position, number in self._sized:
            words[position] = sizes[number]
        for position, number, is_float in self._sized_scalars:
            words[position] = _scalar_word(sizes[number], is_float)
        of_axes = [sizes[size.position] if isinstance(size, SizeArgument) else size for size in self._sizes]
        assert min(of_axes) >= 0, f"sizes of a region: {of_axes}"
        blocks = self._cut.blocks(of_axes)
        words[ROW_BLOCKS], words[COLUMN_BLOCKS], words[TILE] = blocks.row_blocks, blocks.column_blocks, blocks.tile
        words[ROWS], words[COLUMNS] = blocks.rows, blocks.columns
        scratch_bytes = blocks.row_blocks * sum(array_bytes(blocks.columns, dtype) for dtype in self._arrays)
        return BoundKernel(self._kernel, words, WORD * self._layout.input(0), scratch_bytes)


def _scalar_word(value: float, is_float: bool) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0] if is_float else int(value)


class BoundKernel:
    """A kernel with a block of arguments, to be called with tensors; one call at a time has its scratch memory.

    Args:
        kernel: the kernel.
        words: the block of arguments, apart from the addresses of tensors and of scratch memory.
        position: of the first tensor's address in the block, in bytes.
        scratch_bytes: the size of the scratch memory.

    Attributes:
        address: of the block of arguments.
    """

    __slots__ = ("_lock", "_pack", "_run", "_scratch", "_words", "address", "kernel", "position")

    def __init__(self, kernel: Kernel, words: ctypes.Array[ctypes.c_int64], position: int, scratch_bytes: int) -> None:
        region = kernel.region
        self.kernel, self._words, self.position = kernel, words, position
        self._scratch = torch.empty(scratch_bytes + 64, dtype=torch.uint8) if scratch_bytes else None
        if self._scratch is not None:
            words[SCRATCH] = (self._scratch.data_ptr() + 63) & ~63
        self.address = ctypes.addressof(words)
        self._pack = struct.Struct(f"<{len(region.inputs) + len(region.outputs)}q").pack_into
        self._run = kernel.runner.run
        self._lock = threading.Lock()

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Run on the inputs and outputs.

        Raises:
            ZeroDivisionError: an integer was divided by zero.
            IndexError: an index is outside of its size.
            ValueError: an operator doesn't accept a value.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        with self._lock:
            self._pack(self._words, self.position, *addresses)
            self._run(self.address)
            if self._words[_FLAGS] != _NO_FLAGS:
                self._fail()

    def _fail(self) -> None:
        division, index, value = self._words[_FLAGS]
        self._words[_FLAGS] = _NO_FLAGS
        if division:
            raise ZeroDivisionError("An integer was divided by zero in a compiled region. Divide by other numbers.")
        if value:
            raise ValueError("An operator in a compiled region doesn't accept a value.")
        assert index
        raise IndexError("An index is outside of the size of what it selects from, in a compiled region.")
