"""The function by which ONNX Runtime calls a region: `KernelComputeV2` of a custom operator, as machine code.

It reads the addresses of the inputs, asks for the outputs, and computes the blocks on ONNX Runtime's intra-op threads.
No Python runs. Source: OrtCustomOp and OrtKernelContext of onnxruntime_c_api.h.
"""

from __future__ import annotations

import ctypes
import math
import platform
from dataclasses import dataclass

import torch

from lit_ort.kernels.kernel_arguments import (
    BAD_INDEX,
    BLOCK_FUNCTION,
    DIVISION_BY_ZERO,
    WORD,
)
from lit_ort.kernels.kernel_calls import BoundKernel
from lit_ort.kernels.machine_code import Cpu, MachineCode
from lit_ort.kernels.thread_pool import BLOCKS
from lit_ort.regions.element_types import MEMORY_DTYPES
from lit_ort.regions.interpret_region import interpret
from lit_ort.regions.placed_region import PlacedRegion

# The words of a call: the numbers of inputs and outputs, the address of the region's arguments, and that of the first
# tensor's word in it; then the rank and the address of the sizes of each output.
_INPUTS, _OUTPUTS, _ARGUMENTS, _TENSORS, _SHAPES = range(5)
# The words of a value's type: its bytes, the address of its sizes, its rank and its element type.
TYPE_WORDS = 4


@dataclass(frozen=True)
class ContextFunctions:
    """Addresses of functions of ONNX Runtime's C interface, and of `OrtStatus* failed(address of a call's words)`."""

    create_value: int
    release_value: int

    get_input: int
    get_output: int
    get_data: int
    parallel_for: int
    failed: int
    run: int


class OperatorEntry:
    """The machine code of native sessions.

    A run treats denormal numbers as zero, since matmuls take ten times as long with them. Regions and torch nodes keep
    them.

    Args:
        cpu: what to make code for.
        functions: of ONNX Runtime.

    Attributes:
        address: of `compute(node, context)`, where `node` is the address of a word: that of a call's words.
        bind: the address of `OrtStatus* bind(memory, count, values, addresses, bound, types)`, which makes the values
            whose addresses differ from those `bound` anew, none for an address of 0; all are arrays of words, `types`
            one of `TYPE_WORDS` for each value.
        run: the address of a function like OrtApi's `Run`.
    """

    def __init__(self, cpu: Cpu, functions: ContextFunctions) -> None:
        calls = {name: f"inttoptr (i64 {address} to ptr)" for name, address in vars(functions).items()}
        self._code = MachineCode(_state() + BLOCKS + _TEXT.format(**calls), cpu)
        self.address, self.bind, self.run = map(self._code.address, ("compute", "bind", "run"))


def with_denormals(cpu: Cpu, function: int) -> tuple[int, MachineCode]:
    """The address and the code of a `KernelComputeV2` that keeps denormals and calls another one."""
    code = MachineCode(_state() + _WITH_DENORMALS.format(function=f"inttoptr (i64 {function} to ptr)"), cpu)
    return code.address("compute"), code


def _state() -> str:
    return _X86_STATE if platform.machine().lower() in ("x86_64", "amd64") else _NO_STATE


class RegionCallWords:
    """The words of a region's calls with certain sizes.

    Args:
        kernel: the region with its arguments.
        placed: the same with the layouts of its tensors.
        module: the name of the module that the region comes from, for messages; empty if unknown.

    Attributes:
        address: of the words.
    """

    def __init__(self, kernel: BoundKernel, placed: PlacedRegion[int], module: str) -> None:
        shapes = placed.outputs
        self._kernel, self._placed, self._module = kernel, placed, module
        sizes = [size for shape in shapes for size in shape]
        self._sizes = (ctypes.c_int64 * max(1, len(sizes)))(*sizes)
        address, position = ctypes.addressof(self._sizes), 0
        ranks = []
        for shape in shapes:
            ranks += [len(shape), address + WORD * position]
            position += len(shape)
        region = kernel.kernel.region
        head = [len(region.inputs), len(region.outputs), kernel.address, kernel.address + kernel.position]
        self._words = (ctypes.c_int64 * (_SHAPES + len(ranks)))(*head, *ranks)
        self.address = ctypes.addressof(self._words)

    def failure(self) -> str:
        """Why the call that has just failed did so; its tensors must still be there."""
        place = f"a compiled region of {self._module}" if self._module else "a compiled region"
        region, address = self._placed.region, self._kernel.address + self._kernel.position
        addresses = (ctypes.c_int64 * len(region.inputs)).from_address(address)
        tensors = [
            _tensor_at(address, MEMORY_DTYPES[dtype], math.prod(layout.shape))
            for address, dtype, layout in zip(addresses, region.inputs, self._placed.inputs, strict=True)
        ]
        outputs = [
            torch.empty(shape, dtype=MEMORY_DTYPES[dtype])
            for shape, dtype in zip(self._placed.outputs, region.outputs, strict=True)
        ]
        try:
            interpret(region, self._placed.run, tensors, outputs)
        except IndexError as error:
            return f"{place} failed: {error}"
        except RuntimeError:
            pass  # torch's error for a division by zero
        return f"{place} failed: an integer was divided by zero"


def _tensor_at(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


# The state of vector instructions (MXCSR of Intel's manual, volume 1, 10.2.3): with denormals as zero, both as operands
# and as results, or without. Both functions return the state before.
_X86_STATE = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define internal i32 @set_state(i32 %clear, i32 %set) {
  %box = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %box)
  %old = load i32, ptr %box
  %kept = and i32 %old, %clear
  %new = or i32 %kept, %set
  store i32 %new, ptr %box
  call void @llvm.x86.sse.ldmxcsr(ptr %box)
  ret i32 %old
}
define internal i32 @without_denormals() {
  %old = call i32 @set_state(i32 -1, i32 32832)
  ret i32 %old
}
define internal i32 @with_denormals() {
  %old = call i32 @set_state(i32 -32833, i32 0)
  ret i32 %old
}
define internal void @restore(i32 %old) {
  %ignored = call i32 @set_state(i32 0, i32 %old)
  ret void
}
"""
_NO_STATE = """
define internal i32 @without_denormals() { ret i32 0 }
define internal i32 @with_denormals() { ret i32 0 }
define internal void @restore(i32 %old) { ret void }
"""
_WITH_DENORMALS = """
define ptr @compute(ptr %node, ptr %context) {{
  %old = call i32 @with_denormals()
  %status = call ptr {function}(ptr %node, ptr %context)
  call void @restore(i32 %old)
  ret ptr %status
}}
"""
_TEXT = f"""
define ptr @run(ptr %session, ptr %options, ptr %names, ptr %inputs, i64 %count, ptr %outputs, i64 %number,
    ptr %out) {{{{
  %old = call i32 @without_denormals()
  %status = call ptr {{run}}(ptr %session, ptr %options, ptr %names, ptr %inputs, i64 %count, ptr %outputs, i64 %number,
    ptr %out)
  call void @restore(i32 %old)
  ret ptr %status
}}}}
define ptr @bind(ptr %memory, i64 %count, ptr %values, ptr %addresses, ptr %bound, ptr %types) {{{{
entry:
  br label %next
next:
  %k = phi i64 [ 0, %entry ], [ %k_next, %done ]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %compare, label %good
compare:
  %bound_at = getelementptr i64, ptr %bound, i64 %k
  %old = load i64, ptr %bound_at
  %new = call i64 @word(ptr %addresses, i64 %k)
  %same = icmp eq i64 %old, %new
  br i1 %same, label %done, label %release
release:
  %value_at = getelementptr ptr, ptr %values, i64 %k
  %value = load ptr, ptr %value_at
  call void {{release_value}}(ptr %value)
  store ptr null, ptr %value_at
  store i64 0, ptr %bound_at
  %none = icmp eq i64 %new, 0
  br i1 %none, label %done, label %create
create:
  %type_number = mul i64 %k, {TYPE_WORDS}
  %type = getelementptr i64, ptr %types, i64 %type_number
  %bytes = call i64 @word(ptr %type, i64 0)
  %sizes_word = call i64 @word(ptr %type, i64 1)
  %sizes = inttoptr i64 %sizes_word to ptr
  %rank = call i64 @word(ptr %type, i64 2)
  %element_word = call i64 @word(ptr %type, i64 3)
  %element = trunc i64 %element_word to i32
  %data = inttoptr i64 %new to ptr
  %status = call ptr {{create_value}}(ptr %memory, ptr %data, i64 %bytes, ptr %sizes, i64 %rank, i32 %element,
    ptr %value_at)
  %failed = icmp ne ptr %status, null
  br i1 %failed, label %bad, label %created
created:
  store i64 %new, ptr %bound_at
  br label %done
done:
  %k_next = add i64 %k, 1
  br label %next
bad:
  ret ptr %status
good:
  ret ptr null
}}}}
define internal void @block(ptr %arguments, i64 %number) {{{{
  %word = call i64 @word(ptr %arguments, i64 {BLOCK_FUNCTION})
  %function = inttoptr i64 %word to ptr
  %old = call i32 @with_denormals()
  call void %function(ptr %arguments, i64 %number)
  call void @restore(i32 %old)
  ret void
}}}}
define internal ptr @store_data(ptr %value, ptr %tensors, i64 %k) {{{{
  %at = getelementptr i64, ptr %tensors, i64 %k
  %status = call ptr {{get_data}}(ptr %value, ptr %at)
  ret ptr %status
}}}}
define ptr @compute(ptr %node, ptr %context) {{{{
entry:
  %box = alloca ptr
  %words = load ptr, ptr %node
  %inputs = call i64 @word(ptr %words, i64 {_INPUTS})
  %outputs = call i64 @word(ptr %words, i64 {_OUTPUTS})
  %arguments_word = call i64 @word(ptr %words, i64 {_ARGUMENTS})
  %arguments = inttoptr i64 %arguments_word to ptr
  %tensors_word = call i64 @word(ptr %words, i64 {_TENSORS})
  %tensors = inttoptr i64 %tensors_word to ptr
  br label %input
input:
  %k = phi i64 [ 0, %entry ], [ %k_next, %input_stored ]
  %more_inputs = icmp slt i64 %k, %inputs
  br i1 %more_inputs, label %read, label %output
read:
  %input_status = call ptr {{get_input}}(ptr %context, i64 %k, ptr %box)
  %input_failed = icmp ne ptr %input_status, null
  br i1 %input_failed, label %failed, label %input_data
input_data:
  %input_value = load ptr, ptr %box
  %input_data_status = call ptr @store_data(ptr %input_value, ptr %tensors, i64 %k)
  %input_data_failed = icmp ne ptr %input_data_status, null
  br i1 %input_data_failed, label %failed, label %input_stored
input_stored:
  %k_next = add i64 %k, 1
  br label %input
output:
  %j = phi i64 [ 0, %input ], [ %j_next, %output_stored ]
  %more_outputs = icmp slt i64 %j, %outputs
  br i1 %more_outputs, label %allocate, label %start
allocate:
  %twice = shl i64 %j, 1
  %rank_at = add i64 %twice, {_SHAPES}
  %sizes_at = add i64 %rank_at, 1
  %rank = call i64 @word(ptr %words, i64 %rank_at)
  %sizes_word = call i64 @word(ptr %words, i64 %sizes_at)
  %sizes = inttoptr i64 %sizes_word to ptr
  %output_status = call ptr {{get_output}}(ptr %context, i64 %j, ptr %sizes, i64 %rank, ptr %box)
  %output_failed = icmp ne ptr %output_status, null
  br i1 %output_failed, label %failed, label %output_data
output_data:
  %output_value = load ptr, ptr %box
  %position = add i64 %inputs, %j
  %output_data_status = call ptr @store_data(ptr %output_value, ptr %tensors, i64 %position)
  %output_data_failed = icmp ne ptr %output_data_status, null
  br i1 %output_data_failed, label %failed, label %output_stored
output_stored:
  %j_next = add i64 %j, 1
  br label %output
start:
  %count = call i64 @count(ptr %arguments)
  %several = icmp sgt i64 %count, 1
  br i1 %several, label %together, label %alone
together:
  %parallel_status = call ptr {{parallel_for}}(ptr %context, ptr @block, i64 %count, i64 0, ptr %arguments)
  %parallel_failed = icmp ne ptr %parallel_status, null
  br i1 %parallel_failed, label %failed, label %check
alone:
  call void @block(ptr %arguments, i64 0)
  br label %check
check:
  %old = call i32 @with_denormals()
  call void @finish(ptr %arguments)
  call void @restore(i32 %old)
  %division = call i64 @word(ptr %arguments, i64 {DIVISION_BY_ZERO})
  %index = call i64 @word(ptr %arguments, i64 {BAD_INDEX})
  %flags = or i64 %division, %index
  %wrong = icmp ne i64 %flags, 0
  br i1 %wrong, label %report, label %good
report:
  %division_at = getelementptr i64, ptr %arguments, i64 {DIVISION_BY_ZERO}
  store i64 0, ptr %division_at
  %index_at = getelementptr i64, ptr %arguments, i64 {BAD_INDEX}
  store i64 0, ptr %index_at
  %report_status = call ptr {{failed}}(ptr %words)
  ret ptr %report_status
failed:
  %status = phi ptr [ %input_status, %read ], [ %input_data_status, %input_data ], [ %output_status, %allocate ],
    [ %output_data_status, %output_data ], [ %parallel_status, %together ]
  ret ptr %status
good:
  ret ptr null
}}}}
"""
