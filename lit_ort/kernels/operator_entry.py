"""The function by which ONNX Runtime calls a kernel: `KernelComputeV2`, as machine code.

It reads the addresses of the inputs, asks for the outputs, and computes the blocks on ONNX Runtime's intra-op threads
or on OpenMP's. No Python runs. Source: OrtCustomOp and OrtKernelContext of onnxruntime_c_api.h.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lit_ort.kernels.kernel_arguments import (
    BAD_INDEX,
    BAD_VALUE,
    BLOCK_FUNCTION,
    DIVISION_BY_ZERO,
    WORD,
)
from lit_ort.kernels.kernel_calls import BoundKernel
from lit_ort.kernels.machine_code import Cpu, MachineCode
from lit_ort.kernels.thread_pool import BLOCKS, DENORMALS, OpenMP, calls_of
from lit_ort.regions.element_types import MEMORY_DTYPES
from lit_ort.regions.interpret_region import interpret
from lit_ort.regions.placed_region import SizedRegion, output_shapes, with_sizes

# The words of a call: the numbers of inputs and outputs, the address of the arguments, and that of the first tensor's
# word in it; the address of a function that computes all blocks, or 0 for ONNX Runtime's threads; that of a function
# that is called before, or 0; then the rank and the address of the sizes of each output.
_INPUTS, _OUTPUTS, _ARGUMENTS, _TENSORS, _RUN, _PREPARE, _SHAPES = range(7)
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


class OperatorEntry:
    """The machine code of native sessions.

    Args:
        cpu: what to make code for.
        functions: of ONNX Runtime.

    Attributes:
        address: of `compute(node, context)`, where `node` is the address of a word: that of a call's words.
        bind: the address of `OrtStatus* bind(memory, count, values, addresses, bound, types)`, which makes the values
            whose addresses differ from those `bound` anew, none for an address of 0; all are arrays of words, `types`
            one of `TYPE_WORDS` for each value.
    """

    def __init__(self, cpu: Cpu, functions: ContextFunctions) -> None:
        self._code = MachineCode(BLOCKS + _TEXT.format(**calls_of(functions)), cpu)
        self.address, self.bind = map(self._code.address, ("compute", "bind"))


def without_denormals(cpu: Cpu, openmp: OpenMP | None, run: int) -> tuple[int, MachineCode]:
    """The address and the code of a function like OrtApi's `Run` that treats denormal numbers as zero.

    Matmuls take ten times as long with them, and MKL's two hundred times. Regions and torch nodes keep them.

    Args:
        cpu: what to make code for.
        openmp: the threads on which the session runs; None for threads of its own, which ONNX Runtime sets.
        run: the address of `Run`.
    """
    return _around(_RUN_WITHOUT_DENORMALS, "run", cpu, openmp, run)


def with_denormals(cpu: Cpu, openmp: OpenMP | None, compute: int) -> tuple[int, MachineCode]:
    """The address and the code of a `KernelComputeV2` that keeps denormals and calls another one, at this address."""
    return _around(_COMPUTE_WITH_DENORMALS, "compute", cpu, openmp, compute)


def _around(text: str, name: str, cpu: Cpu, openmp: OpenMP | None, function: int) -> tuple[int, MachineCode]:
    call = text.format(function=f"inttoptr (i64 {function} to ptr)")
    code = MachineCode(DENORMALS + _states(openmp) + call, cpu)
    return code.address(name), code


def _states(openmp: OpenMP | None) -> str:
    """Functions that set the state of all threads of a run, and what reads memory for the states before."""
    if openmp is None:
        return _STATES + _ONE_THREAD
    return _STATES + _TEAM.format(**calls_of(openmp))


class CallWords:
    """The words of calls with certain sizes.

    Args:
        inputs: the number of inputs.
        shapes: of the outputs.
        arguments: the address of the kernel's arguments.
        tensors: the address of the first tensor's word in it.
        run: the address of a function that computes all blocks; 0 computes them on ONNX Runtime's threads.
        prepare: the address of a function of the arguments that is called before, or 0.

    Attributes:
        address: of the words.
    """

    def __init__(
        self,
        inputs: int,
        shapes: Sequence[Sequence[int]],
        arguments: int,
        tensors: int,
        run: int,
        prepare: int = 0,
    ) -> None:
        sizes = [size for shape in shapes for size in shape]
        self._sizes = (ctypes.c_int64 * max(1, len(sizes)))(*sizes)
        address = ctypes.addressof(self._sizes)
        ranks = []
        for shape in shapes:
            ranks += [len(shape), address]
            address += WORD * len(shape)
        head = [inputs, len(shapes), arguments, tensors, run, prepare]
        self._words = (ctypes.c_int64 * (_SHAPES + len(ranks)))(*head, *ranks)
        self.address = ctypes.addressof(self._words)


class RegionCallWords(CallWords):
    """The words of a region's calls with certain sizes.

    Args:
        kernel: the region with its arguments.
        placed: the same with the layouts of its tensors.
        sizes: of the calls.
        module: the name of the module that the region comes from, for messages; empty if unknown.
        uses_openmp: whether OpenMP's threads compute it.
    """

    def __init__(
        self, kernel: BoundKernel, placed: SizedRegion, sizes: Sequence[int], module: str, uses_openmp: bool = False
    ) -> None:
        self._kernel, self._placed, self._sizes_of_calls, self._module = kernel, placed, sizes, module
        run = kernel.kernel.runner.address if uses_openmp else 0
        inputs = len(kernel.kernel.region.inputs)
        outputs = output_shapes(placed, sizes)
        super().__init__(inputs, outputs, kernel.address, kernel.address + kernel.position, run)

    def failure(self) -> str:
        """Why the call that has just failed did so; its tensors must still be there."""
        place = f"a compiled region of {self._module}" if self._module else "a compiled region"
        placed = with_sizes(self._placed, self._sizes_of_calls)
        region, address = placed.region, self._kernel.address + self._kernel.position
        addresses = (ctypes.c_int64 * len(region.inputs)).from_address(address)
        tensors = [
            _tensor_at(address, MEMORY_DTYPES[dtype], math.prod(layout.shape))
            for address, dtype, layout in zip(addresses, region.inputs, placed.inputs, strict=True)
        ]
        outputs = [
            torch.empty(shape, dtype=MEMORY_DTYPES[dtype])
            for shape, dtype in zip(placed.outputs, region.outputs, strict=True)
        ]
        try:
            interpret(region, placed.run, tensors, outputs)
        except (IndexError, ValueError) as error:
            return f"{place} failed: {error}"
        except RuntimeError:
            pass  # torch's error for a division by zero
        return f"{place} failed: an integer was divided by zero"


def _tensor_at(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


# Each sets the state of the calling thread, whose number it finds itself, and stores or reads the one before.
_STATES = """
define internal ptr @slot(ptr %saved) {
  %thread = call i64 @thread()
  %at = getelementptr i32, ptr %saved, i64 %thread
  ret ptr %at
}
define internal void @clear_state(ptr %saved) {
  %at = call ptr @slot(ptr %saved)
  %old = call i32 @without_denormals()
  store i32 %old, ptr %at
  ret void
}
define internal void @keep_state(ptr %saved) {
  %at = call ptr @slot(ptr %saved)
  %old = call i32 @with_denormals()
  store i32 %old, ptr %at
  ret void
}
define internal void @restore_state(ptr %saved) {
  %at = call ptr @slot(ptr %saved)
  %old = load i32, ptr %at
  call void @restore(i32 %old)
  ret void
}
"""
_ONE_THREAD = """
define internal i64 @threads() { ret i64 1 }
define internal i64 @thread() { ret i64 0 }
define internal void @on_all(ptr %function, ptr %saved, i64 %threads) {
  call void %function(ptr %saved)
  ret void
}
"""
_TEAM = """
define internal i64 @threads() {{
  %most = call i32 {most_threads}()
  %inside = call i32 {is_parallel}()
  %nested = icmp ne i32 %inside, 0
  %threads32 = select i1 %nested, i32 1, i32 %most
  %threads = sext i32 %threads32 to i64
  ret i64 %threads
}}
define internal i64 @thread() {{
  %inside = call i32 {is_parallel}()
  %number = call i32 {thread}()
  %nested = icmp ne i32 %inside, 0
  %thread32 = select i1 %nested, i32 %number, i32 0
  %thread = sext i32 %thread32 to i64
  ret i64 %thread
}}
define internal void @on_all(ptr %function, ptr %saved, i64 %threads) {{
  %several = icmp sgt i64 %threads, 1
  br i1 %several, label %together, label %alone
together:
  %threads32 = trunc i64 %threads to i32
  call void {parallel}(ptr %function, ptr %saved, i32 %threads32, i32 0)
  ret void
alone:
  call void %function(ptr %saved)
  ret void
}}
"""
_RUN_WITHOUT_DENORMALS = """
define ptr @run(ptr %session, ptr %options, ptr %names, ptr %inputs, i64 %count, ptr %outputs, i64 %number,
    ptr %out) {{
  %threads = call i64 @threads()
  %saved = alloca i32, i64 %threads
  call void @on_all(ptr @clear_state, ptr %saved, i64 %threads)
  %status = call ptr {function}(ptr %session, ptr %options, ptr %names, ptr %inputs, i64 %count, ptr %outputs,
    i64 %number, ptr %out)
  call void @on_all(ptr @restore_state, ptr %saved, i64 %threads)
  ret ptr %status
}}
"""
_COMPUTE_WITH_DENORMALS = """
define ptr @compute(ptr %node, ptr %context) {{
  %threads = call i64 @threads()
  %saved = alloca i32, i64 %threads
  call void @on_all(ptr @keep_state, ptr %saved, i64 %threads)
  %status = call ptr {function}(ptr %node, ptr %context)
  call void @on_all(ptr @restore_state, ptr %saved, i64 %threads)
  ret ptr %status
}}
"""
_TEXT = f"""
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
  %prepare_word = call i64 @word(ptr %words, i64 {_PREPARE})
  %has_prepare = icmp ne i64 %prepare_word, 0
  br i1 %has_prepare, label %prepare, label %run_blocks
prepare:
  %prepare_function = inttoptr i64 %prepare_word to ptr
  call void %prepare_function(ptr %arguments)
  br label %run_blocks
run_blocks:
  %run_word = call i64 @word(ptr %words, i64 {_RUN})
  %has_run = icmp ne i64 %run_word, 0
  br i1 %has_run, label %openmp, label %session
openmp:
  %run = inttoptr i64 %run_word to ptr
  call void %run(ptr %arguments)
  br label %flags
session:
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
  call void @finish(ptr %arguments)
  br label %flags
flags:
  %division = call i64 @word(ptr %arguments, i64 {DIVISION_BY_ZERO})
  %index = call i64 @word(ptr %arguments, i64 {BAD_INDEX})
  %value = call i64 @word(ptr %arguments, i64 {BAD_VALUE})
  %two = or i64 %division, %index
  %any = or i64 %two, %value
  %wrong = icmp ne i64 %any, 0
  br i1 %wrong, label %report, label %good
report:
  %division_at = getelementptr i64, ptr %arguments, i64 {DIVISION_BY_ZERO}
  store i64 0, ptr %division_at
  %index_at = getelementptr i64, ptr %arguments, i64 {BAD_INDEX}
  store i64 0, ptr %index_at
  %value_at = getelementptr i64, ptr %arguments, i64 {BAD_VALUE}
  store i64 0, ptr %value_at
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
