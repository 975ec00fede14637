"""Runs the blocks of a kernel on the threads of OpenMP that torch uses, so that there is one pool in the process."""

from __future__ import annotations

import ctypes
import platform

from lit_ort._compat.openmp import OpenMP
from lit_ort.kernels.kernel_arguments import BLOCK_FUNCTION, COLUMN_BLOCKS, FINISH_FUNCTION, ROW_BLOCKS
from lit_ort.kernels.machine_code import Cpu, MachineCode


class Runner:
    """The machine code `run(arguments)`, which computes all blocks of a kernel and then finishes.

    Args:
        cpu: what to make code for.
        openmp: the threads to use; None computes on the calling thread.
    """

    def __init__(self, cpu: Cpu, openmp: OpenMP | None) -> None:
        self._code = MachineCode(_SERIAL if openmp is None else _PARALLEL.format(**calls_of(openmp)), cpu)
        self.address = self._code.address("run")
        self.run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


def calls_of(functions: object) -> dict[str, str]:
    """The words with which a module of LLVM calls functions, whose addresses are an object's attributes."""
    return {name: f"inttoptr (i64 {address} to ptr)" for name, address in vars(functions).items()}


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
DENORMALS = _X86_STATE if platform.machine().lower() in ("x86_64", "amd64") else _NO_STATE
# A word of a block of arguments.
WORD_FUNCTION = """
define internal i64 @word(ptr %args, i64 %position) alwaysinline {
  %at = getelementptr i64, ptr %args, i64 %position
  %value = load i64, ptr %at
  ret i64 %value
}
"""
# A word that is an address.
POINTER_FUNCTION = """
define internal ptr @pointer(ptr %args, i64 %position) alwaysinline {
  %word = call i64 @word(ptr %args, i64 %position)
  %pointer = inttoptr i64 %word to ptr
  ret ptr %pointer
}
"""
# Functions of a block of arguments: a word of it, the number of its blocks, some of them, and what follows them.
BLOCKS = (
    WORD_FUNCTION
    + DENORMALS
    + f"""
define internal i64 @count(ptr %args) {{
  %rows = call i64 @word(ptr %args, i64 {ROW_BLOCKS})
  %columns = call i64 @word(ptr %args, i64 {COLUMN_BLOCKS})
  %count = mul i64 %rows, %columns
  ret i64 %count
}}
define internal void @some(ptr %args, i64 %low, i64 %high) {{
  %address = call i64 @word(ptr %args, i64 {BLOCK_FUNCTION})
  %block = inttoptr i64 %address to ptr
  %state = call i32 @with_denormals()
  br label %head
head:
  %number = phi i64 [ %low, %0 ], [ %next, %body ]
  %more = icmp slt i64 %number, %high
  br i1 %more, label %body, label %done
body:
  call void %block(ptr %args, i64 %number)
  %next = add i64 %number, 1
  br label %head
done:
  call void @restore(i32 %state)
  ret void
}}
define internal void @finish(ptr %args) {{
  %address = call i64 @word(ptr %args, i64 {FINISH_FUNCTION})
  %has = icmp ne i64 %address, 0
  br i1 %has, label %call, label %done
call:
  %function = inttoptr i64 %address to ptr
  %state = call i32 @with_denormals()
  call void %function(ptr %args)
  call void @restore(i32 %state)
  br label %done
done:
  ret void
}}
"""
)
_SERIAL = (
    BLOCKS
    + """
define void @run(ptr %args) {
  %count = call i64 @count(ptr %args)
  call void @some(ptr %args, i64 0, i64 %count)
  call void @finish(ptr %args)
  ret void
}
"""
)
_PARALLEL = (
    BLOCKS.replace("{", "{{").replace("}", "}}")
    + """
define void @share(ptr %args) {{
  %count = call i64 @count(ptr %args)
  %thread32 = call i32 {thread}()
  %threads32 = call i32 {threads}()
  %thread = sext i32 %thread32 to i64
  %threads = sext i32 %threads32 to i64
  %following = add i64 %thread, 1
  %first = mul i64 %thread, %count
  %last = mul i64 %following, %count
  %low = sdiv i64 %first, %threads
  %high = sdiv i64 %last, %threads
  call void @some(ptr %args, i64 %low, i64 %high)
  ret void
}}
define void @run(ptr %args) {{
  %count = call i64 @count(ptr %args)
  %several = icmp sgt i64 %count, 1
  br i1 %several, label %ask, label %alone
ask:
  %most32 = call i32 {most_threads}()
  %inside = call i32 {is_parallel}()
  %most = sext i32 %most32 to i64
  %fewer = icmp slt i64 %most, %count
  %threads = select i1 %fewer, i64 %most, i64 %count
  %one = icmp sle i64 %threads, 1
  %nested = icmp ne i32 %inside, 0
  %serial = or i1 %one, %nested
  br i1 %serial, label %alone, label %together
together:
  %threads32 = trunc i64 %threads to i32
  call void {parallel}(ptr @share, ptr %args, i32 %threads32, i32 0)
  br label %end
alone:
  call void @some(ptr %args, i64 0, i64 %count)
  br label %end
end:
  call void @finish(ptr %args)
  ret void
}}
"""
)
