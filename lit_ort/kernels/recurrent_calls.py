"""Loops over time of recurrent layers as kernels of native sessions: machine code around the loop's.

A call has the addresses of its inputs and outputs alone. Before the loop, `prepare` puts them where the loop reads
them, as the first element of the step that runs first; it copies the gradients of the last states into the results that
the loop changes, and packs the weights. After it, `finish` copies the states of the last step, of a packed sequence
from the rows that `places` has.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lit_ort.kernels.kernel_arguments import FINISH_FUNCTION, WORD
from lit_ort.kernels.machine_code import Cpu, MachineCode
from lit_ort.kernels.operator_entry import CallWords
from lit_ort.kernels.recurrent_arguments import CELLS, PLACES, WORDS, Strided, loop_outputs, pack
from lit_ort.kernels.recurrent_loop import LoopCode, RecurrentLoops
from lit_ort.kernels.thread_pool import POINTER_FUNCTION, WORD_FUNCTION

_POINTERS = ("weight", "input_bias", "bias", "packed")
# Positions of the words behind those of a loop: the number and the address of the places that depend on tensors, and of
# the copies before and after; the function that packs the weights; the addresses of inputs and outputs.
_PLACES, _BEFORE, _AFTER, _PACK, _TENSORS = (WORDS + k for k in (0, 2, 4, 6, 7))


@dataclass(frozen=True)
class RecurrentCall:
    """The loop of a layer or of its gradient, over contiguous values.

    Args:
        mode: the kind of layer, of `CELLS`.
        reverse: whether the layer's steps run from the last to the first.
        dtype: of all values.
        sizes: the steps, the rows of the first one, and the width of the state.
        inputs: the names of the inputs that there are, in the order of `FORWARD_INPUTS` or of `BACKWARD_INPUTS`.
        rows: the rows of all steps.
    """

    mode: str
    reverse: bool
    dtype: torch.dtype
    sizes: tuple[int, int, int]
    inputs: tuple[str, ...]
    rows: int

    @property
    def is_forward(self) -> bool:
        return "matmuls" in self.inputs

    @property
    def is_packed(self) -> bool:
        return "tables" in self.inputs

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs by their names, in order; a last one, for the packed weights, follows them."""
        kind, (steps, rows, hidden) = CELLS[self.mode], self.sizes
        columns = {"output": hidden, "saved": kind.saved * hidden, "gradients": kind.gradients * hidden}
        names = loop_outputs(self.mode, self.is_forward)
        of_steps = (self.rows,) if self.is_packed else (steps, rows)
        return {name: (*of_steps, columns[name]) if name in columns else (1, rows, hidden) for name in names}


@dataclass(frozen=True)
class _Copy:
    """A copy of rows: from a tensor, or zeros if the call has no such tensor, to all elements of another one.

    Args:
        source, target: the names of the tensors.
        offset, stride: the first row of the source and the distance of its rows, in bytes.
        rows, bytes: their number and their size.
        index: the name of a tensor with the numbers of the source's rows; empty if they follow each other.
    """

    source: str
    target: str
    offset: int
    stride: int
    rows: int
    bytes: int
    index: str = ""


class RecurrentCallCode:
    """The machine code around all loops.

    Args:
        cpu: what to make code for.
    """

    def __init__(self, cpu: Cpu) -> None:
        self._code = MachineCode(WORD_FUNCTION + POINTER_FUNCTION + _TEXT, cpu)
        self.prepare, self.finish = map(self._code.address, ("prepare", "finish"))


class RecurrentCallWords(CallWords):
    """The words of a loop's calls.

    Args:
        code: the machine code around loops.
        loops: the loops of this process.
        call: the loop.
        uses_openmp: whether OpenMP's threads compute it.
    """

    def __init__(self, code: RecurrentCallCode, loops: RecurrentLoops, call: RecurrentCall, uses_openmp: bool) -> None:
        loop = loops.loop(call.mode, call.dtype, call.is_forward, call.is_packed)
        packed = loops.packed_elements(call.mode, call.sizes[2], call.dtype)
        names = [*call.inputs, *call.outputs, "packed"]
        # The gradients of an output that has none, and of the gates of rows whose sequences have ended.
        zeros = torch.zeros(CELLS[call.mode].gates * call.sizes[2], dtype=call.dtype)
        # What the words refer to by address.
        self._used: list[Any] = [code, loops, zeros]
        words = list(struct.unpack(f"<{WORDS}q", _block_of(call, loop, loops, zeros.data_ptr())))
        words[FINISH_FUNCTION] = code.finish
        positions = {name: _TENSORS + k for k, name in enumerate(names)}
        for table in (_places(call, positions), *_copies(call, positions)):
            words += self._counted(table)
        words += [loop.pack, *(0 for _ in names)]
        arguments = (ctypes.c_int64 * len(words))(*words)
        self._used.append(arguments)
        address = ctypes.addressof(arguments)
        run = loops.runner.address if uses_openmp else 0
        shapes = [*call.outputs.values(), (packed,)]
        super().__init__(len(call.inputs), shapes, address, address + WORD * _TENSORS, run, code.prepare)

    def _counted(self, table: Sequence[Sequence[int]]) -> list[int]:
        """The number of rows of a table, and the address of its words."""
        words = [word for row in table for word in row]
        array = (ctypes.c_int64 * len(words))(*words)
        self._used.append(array)
        return [len(table), ctypes.addressof(array)]


def _block_of(call: RecurrentCall, loop: LoopCode, loops: RecurrentLoops, zeros: int) -> bytes:
    """The arguments of the loop without the addresses of tensors."""
    arrays = {name: Strided(0, array.step, array.row) for name, array in _arrays(call).items()}
    if "grad" not in call.inputs:
        arrays["grad"] = Strided(zeros)
    blocks = loops.blocks(call.mode, call.sizes, call.rows, call.is_forward)
    return bytes(pack(loop.block, blocks, call.sizes, {"zeros": zeros}, arrays))


def _places(call: RecurrentCall, positions: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Where the loop reads the address of each tensor: positions of that word and of the tensor's, and an offset."""
    places = [(PLACES[name], positions[name], 0) for name in _POINTERS if name in positions]
    if call.is_packed:
        row, first = call.sizes[0] + 2, 0 if call.is_forward else 2
        # Tables have no rows before the first step.
        starts = {"step_rows": row * first + 1, "step_starts": row * (first + 1) + 1}
        places += [(PLACES[name], positions["tables"], WORD * start) for name, start in starts.items()]
    arrays = {name: array for name, array in _arrays(call).items() if name in positions}
    return places + [(PLACES[f"{name}.address"], positions[name], array.address) for name, array in arrays.items()]


def _copies(call: RecurrentCall, positions: Mapping[str, int]) -> list[list[tuple[int, ...]]]:
    """The words of the copies before and after the loop; a source at 0 is zeros."""
    return [
        [
            (
                *(positions.get(one.source, 0), one.offset, one.stride, positions[one.target], one.rows, one.bytes),
                positions.get(one.index, 0),
            )
            for one in copies
        ]
        for copies in (_copies_before(call), _copies_after(call))
    ]


def _arrays(call: RecurrentCall) -> dict[str, Strided]:
    """The arrays of a loop; their addresses are in bytes from the tensor with their name."""
    kind, hidden = CELLS[call.mode], call.sizes[2]
    reverse = call.reverse == call.is_forward
    blocks = {"output": 1, "saved": kind.saved, "matmuls": kind.gates, "grad": 1, "gradients": kind.gradients}
    steps = {name: _steps(call, count * hidden, reverse) for name, count in blocks.items()}
    return steps | dict.fromkeys(("state", "cell", "of_state", "of_cell"), Strided(0, 0, hidden))


def _steps(call: RecurrentCall, columns: int, reverse: bool) -> Strided:
    steps, rows, _ = call.sizes
    if call.is_packed:
        return Strided(0, 0, columns)
    step = rows * columns
    return Strided((steps - 1) * step * call.dtype.itemsize, -step, columns) if reverse else Strided(0, step, columns)


def _copies_before(call: RecurrentCall) -> list[_Copy]:
    """The gradients of the last states, to where those of the states before become those of the first ones."""
    size = call.sizes[1] * call.sizes[2] * call.dtype.itemsize
    pairs = (("of_last", "of_state"), ("of_last_cell", "of_cell"))
    return [_Copy(source, target, 0, size, 1, size) for source, target in pairs if target in call.outputs]


def _copies_after(call: RecurrentCall) -> list[_Copy]:
    """The states of the last step."""
    if not call.is_forward:
        return []
    (steps, rows, hidden), size = call.sizes, call.dtype.itemsize
    first_row = 0 if call.reverse or call.is_packed else (steps - 1) * rows
    index = "places" if call.is_packed else ""
    copies = [_Copy("output", "last", first_row * hidden * size, hidden * size, rows, hidden * size, index)]
    if "last_cell" in call.outputs:
        row = CELLS[call.mode].saved * hidden * size
        # The cell's state is the last block of what a step saves.
        first = first_row * row + row - hidden * size
        copies.append(_Copy("saved", "last_cell", first, row, rows, hidden * size, index))
    return copies


_TEXT = f"""
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
define internal void @each(ptr %args, i64 %position, i64 %width, ptr %function) {{
entry:
  %count = call i64 @word(ptr %args, i64 %position)
  %table_position = add i64 %position, 1
  %table = call ptr @pointer(ptr %args, i64 %table_position)
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %k_next, %body ]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %body, label %done
body:
  %at = mul i64 %k, %width
  %row = getelementptr i64, ptr %table, i64 %at
  call void %function(ptr %args, ptr %row)
  %k_next = add i64 %k, 1
  br label %head
done:
  ret void
}}
define internal void @place(ptr %args, ptr %row) {{
  %target = call i64 @word(ptr %row, i64 0)
  %tensor = call i64 @word(ptr %row, i64 1)
  %offset = call i64 @word(ptr %row, i64 2)
  %start = call i64 @word(ptr %args, i64 %tensor)
  %address = add i64 %start, %offset
  %slot = getelementptr i64, ptr %args, i64 %target
  store i64 %address, ptr %slot
  ret void
}}
define internal void @copy(ptr %args, ptr %copy) {{
entry:
  %source = call i64 @word(ptr %copy, i64 0)
  %offset = call i64 @word(ptr %copy, i64 1)
  %stride = call i64 @word(ptr %copy, i64 2)
  %target = call i64 @word(ptr %copy, i64 3)
  %rows = call i64 @word(ptr %copy, i64 4)
  %bytes = call i64 @word(ptr %copy, i64 5)
  %index = call i64 @word(ptr %copy, i64 6)
  %to = call ptr @pointer(ptr %args, i64 %target)
  %has_source = icmp ne i64 %source, 0
  br i1 %has_source, label %start, label %zeros
zeros:
  %size = mul i64 %rows, %bytes
  call void @llvm.memset.p0.i64(ptr %to, i8 0, i64 %size, i1 false)
  ret void
start:
  %tensor = call ptr @pointer(ptr %args, i64 %source)
  %from = getelementptr i8, ptr %tensor, i64 %offset
  %has_index = icmp ne i64 %index, 0
  br label %head
head:
  %row = phi i64 [ 0, %start ], [ %row_next, %body ]
  %more = icmp slt i64 %row, %rows
  br i1 %more, label %choose, label %done
choose:
  br i1 %has_index, label %indexed, label %body
indexed:
  %numbers = call ptr @pointer(ptr %args, i64 %index)
  %indexed_row = call i64 @word(ptr %numbers, i64 %row)
  br label %body
body:
  %from_row_number = phi i64 [ %row, %choose ], [ %indexed_row, %indexed ]
  %from_bytes = mul i64 %from_row_number, %stride
  %to_bytes = mul i64 %row, %bytes
  %from_row = getelementptr i8, ptr %from, i64 %from_bytes
  %to_row = getelementptr i8, ptr %to, i64 %to_bytes
  call void @llvm.memcpy.p0.p0.i64(ptr %to_row, ptr %from_row, i64 %bytes, i1 false)
  %row_next = add i64 %row, 1
  br label %head
done:
  ret void
}}
define void @prepare(ptr %args) {{
  call void @each(ptr %args, i64 {_PLACES}, i64 3, ptr @place)
  call void @each(ptr %args, i64 {_BEFORE}, i64 7, ptr @copy)
  %pack = call ptr @pointer(ptr %args, i64 {_PACK})
  call void %pack(ptr %args)
  ret void
}}
define void @finish(ptr %args) {{
  call void @each(ptr %args, i64 {_AFTER}, i64 7, ptr @copy)
  ret void
}}
"""
