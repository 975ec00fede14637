"""Matmuls as kernels: machine code that calls a function of BLAS with the addresses in a block of arguments.

A kernel runs on OpenMP's threads, like a region's: its blocks write what is added to the matmul into the result, and
it finishes with the matmul. The interface is Fortran's, whose matrices are stored by columns: the matmul of two
matrices stored by rows is that of their transposes, the right one first.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lit_ort._compat.torch_blas import MatmulFunctions
from lit_ort.kernels.kernel_arguments import BLOCK_FUNCTION, COLUMN_BLOCKS, FINISH_FUNCTION, ROW_BLOCKS, WORD, sum_dtype
from lit_ort.kernels.machine_code import Cpu, MachineCode
from lit_ort.kernels.matmul_library import MatmulLibrary, is_large
from lit_ort.kernels.operator_entry import CallWords
from lit_ort.kernels.thread_pool import DENORMALS, POINTER_FUNCTION, WORD_FUNCTION, Runner, calls_of

# Positions of the words of arguments behind those of all kernels. The left and the right factor, what is added, if
# anything is, and the result are the last words.
_RESULT_POSITION = 3
_OWN = FINISH_FUNCTION + 1
_COLUMNS, _ROWS, _INNER, _RIGHT_ROW, _LEFT_ROW, _RESULT_ROW, _RIGHT_FORM, _LEFT_FORM = range(_OWN, _OWN + 8)
_ALPHA, _BETA, _COUNT, _RIGHT_BYTES, _LEFT_BYTES, _RESULT_BYTES, _GROUPS = range(_OWN + 8, _OWN + 15)
_RIGHT_ADDRESSES, _LEFT_ADDRESSES, _RESULT_ADDRESSES, _ROW_BYTES, _ADDED_BYTES = range(_OWN + 15, _OWN + 20)
_LEFT, _RIGHT, _ADDED = range(_OWN + 20, _OWN + 23)
_TRANSPOSED, _AS_IS = ord("T"), ord("N")
# Bytes of a result that one block writes before the matmul is added.
_BLOCK_BYTES = 2**18


@dataclass(frozen=True)
class Matmul:
    """A matmul of contiguous values.

    Args:
        dtype: of the factors; other values are float32 if these are bfloat16, and otherwise of the same dtype.
        count: of the matrices in a batch.
        rows, columns, inner: the sizes of the matmul of [rows, inner] and [inner, columns].
        transposed: whether the left and the right factor are stored as their transposes.
        added: None, or whether the value that is added to the matmul has rows of its own; otherwise it is one row.
    """

    dtype: torch.dtype
    count: int
    rows: int
    columns: int
    inner: int
    transposed: tuple[bool, bool]
    added: bool | None = None

    @property
    def tensors(self) -> int:
        """The number of its inputs."""
        return 2 + (self.added is not None)


class MatmulCallWords(CallWords):
    """The words of a matmul's calls.

    Args:
        code: of matmuls.
        matmul: the matmul.
        shape: of the result.
    """

    def __init__(self, code: MatmulCode, matmul: Matmul, shape: Sequence[int]) -> None:
        self._arguments = MatmulArguments(code, matmul)
        super().__init__(matmul.tensors, [shape], self._arguments.address, self._arguments.tensors, code.runner.address)


class MatmulCode:
    """The machine code of matmuls.

    Args:
        library: the functions of BLAS.
        cpu: what to make code for.
        runner: computes a matmul with its arguments.
    """

    def __init__(self, library: MatmulLibrary, cpu: Cpu, runner: Runner) -> None:
        self.runner = runner
        self._library, self._cpu = library, cpu
        self._codes: dict[MatmulFunctions, MachineCode] = {}

    def address(self, name: str, matmul: Matmul) -> int:
        """The address of the function `fill` or `matmul` for a matmul."""
        large = is_large(matmul.count, matmul.rows, matmul.columns, matmul.inner)
        functions = self._library.functions(matmul.dtype, large)
        code = self._codes.get(functions)
        if code is None:
            parts = WORD_FUNCTION, POINTER_FUNCTION, DENORMALS, _FILL, _MATMUL.format(**calls_of(functions))
            # Addresses are those of the code that is kept, if several threads make one.
            code = self._codes.setdefault(functions, MachineCode("\n".join(parts), self._cpu))
        return code.address(name)


class MatmulArguments:
    """The block of arguments of a matmul.

    Attributes:
        address: of the block.
        tensors: the address of the word of the first tensor's address.
    """

    def __init__(self, code: MatmulCode, matmul: Matmul) -> None:
        size, count = matmul.dtype.itemsize, matmul.count
        exact = sum_dtype(matmul.dtype)
        row_bytes = exact.itemsize * matmul.columns
        left_columns, right_columns = matmul.inner, matmul.columns
        if matmul.transposed[0]:
            left_columns = matmul.rows
        if matmul.transposed[1]:
            right_columns = matmul.inner
        result_bytes = row_bytes * matmul.rows
        is_added = matmul.added is not None
        self._addresses = (ctypes.c_int64 * (3 * count))()
        arrays = ctypes.addressof(self._addresses)
        self._words = words = (ctypes.c_int64 * (_ADDED + 2))()
        values = {
            ROW_BLOCKS: min(matmul.rows, 1 + result_bytes // _BLOCK_BYTES) if is_added else 0,
            COLUMN_BLOCKS: 1,
            _RESULT_POSITION: _ADDED + is_added,
            BLOCK_FUNCTION: code.address("fill", matmul),
            FINISH_FUNCTION: code.address("matmul", matmul),
            _COLUMNS: matmul.columns,
            _ROWS: matmul.rows,
            _INNER: matmul.inner,
            _RIGHT_ROW: max(1, right_columns),
            _LEFT_ROW: max(1, left_columns),
            _RESULT_ROW: max(1, matmul.columns),
            _RIGHT_FORM: _TRANSPOSED if matmul.transposed[1] else _AS_IS,
            _LEFT_FORM: _TRANSPOSED if matmul.transposed[0] else _AS_IS,
            _ALPHA: _bits(1.0, exact),
            _BETA: _bits(float(is_added), exact),
            _COUNT: count,
            _RIGHT_BYTES: size * matmul.inner * matmul.columns,
            _LEFT_BYTES: size * matmul.rows * matmul.inner,
            _RESULT_BYTES: result_bytes,
            _GROUPS: 1,
            _RIGHT_ADDRESSES: arrays,
            _LEFT_ADDRESSES: arrays + WORD * count,
            _RESULT_ADDRESSES: arrays + 2 * WORD * count,
            _ROW_BYTES: row_bytes,
            _ADDED_BYTES: row_bytes if matmul.added else 0,
        }
        for position, value in values.items():
            words[position] = value
        self.address = ctypes.addressof(words)
        self.tensors = self.address + WORD * _LEFT


def _bits(value: float, dtype: torch.dtype) -> int:
    packed = struct.pack("<f4x" if dtype == torch.float32 else "<d", value)
    return struct.unpack("<q", packed)[0]


_FILL = f"""
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
define internal ptr @result(ptr %args) {{
  %position = call i64 @word(ptr %args, i64 {_RESULT_POSITION})
  %result = call ptr @pointer(ptr %args, i64 %position)
  ret ptr %result
}}
define void @fill(ptr %args, i64 %number) {{
entry:
  %rows = call i64 @word(ptr %args, i64 {_ROWS})
  %blocks = call i64 @word(ptr %args, i64 {ROW_BLOCKS})
  %bytes = call i64 @word(ptr %args, i64 {_ROW_BYTES})
  %stride = call i64 @word(ptr %args, i64 {_ADDED_BYTES})
  %added = call ptr @pointer(ptr %args, i64 {_ADDED})
  %result = call ptr @result(ptr %args)
  %next = add i64 %number, 1
  %first_part = mul i64 %rows, %number
  %last_part = mul i64 %rows, %next
  %first = udiv i64 %first_part, %blocks
  %last = udiv i64 %last_part, %blocks
  br label %head
head:
  %row = phi i64 [ %first, %entry ], [ %row_next, %body ]
  %more = icmp slt i64 %row, %last
  br i1 %more, label %body, label %done
body:
  %to_bytes = mul i64 %row, %bytes
  %from_bytes = mul i64 %row, %stride
  %to = getelementptr i8, ptr %result, i64 %to_bytes
  %from = getelementptr i8, ptr %added, i64 %from_bytes
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  %row_next = add i64 %row, 1
  br label %head
done:
  ret void
}}
define internal ptr @addresses(ptr %args, ptr %base, i64 %stride_position, i64 %array_position) {{
entry:
  %count = call i64 @word(ptr %args, i64 {_COUNT})
  %stride = call i64 @word(ptr %args, i64 %stride_position)
  %array = call ptr @pointer(ptr %args, i64 %array_position)
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %k_next, %body ]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %body, label %done
body:
  %bytes = mul i64 %k, %stride
  %at = getelementptr i8, ptr %base, i64 %bytes
  %slot = getelementptr ptr, ptr %array, i64 %k
  store ptr %at, ptr %slot
  %k_next = add i64 %k, 1
  br label %head
done:
  ret ptr %array
}}
"""
_REFERENCES = {
    "right_form": _RIGHT_FORM,
    "left_form": _LEFT_FORM,
    "columns": _COLUMNS,
    "rows": _ROWS,
    "inner": _INNER,
    "alpha": _ALPHA,
    "right_row": _RIGHT_ROW,
    "left_row": _LEFT_ROW,
    "beta": _BETA,
    "result_row": _RESULT_ROW,
    "count_at": _COUNT,
    "groups": _GROUPS,
}
_SIZES = "ptr %right_form, ptr %left_form, ptr %columns, ptr %rows, ptr %inner, ptr %alpha"
_MATMUL = f"""
define void @matmul(ptr %args) {{{{
{chr(10).join(f"  %{name} = getelementptr i64, ptr %args, i64 {position}" for name, position in _REFERENCES.items())}
  %left = call ptr @pointer(ptr %args, i64 {_LEFT})
  %right = call ptr @pointer(ptr %args, i64 {_RIGHT})
  %out = call ptr @result(ptr %args)
  %count = load i64, ptr %count_at
  %single = icmp eq i64 %count, 1
  %state = call i32 @without_denormals()
  br i1 %single, label %one, label %many
one:
  call void {{gemm}}({_SIZES}, ptr %right, ptr %right_row, ptr %left, ptr %left_row, ptr %beta, ptr %out,
    ptr %result_row)
  call void @restore(i32 %state)
  ret void
many:
  %rights = call ptr @addresses(ptr %args, ptr %right, i64 {_RIGHT_BYTES}, i64 {_RIGHT_ADDRESSES})
  %lefts = call ptr @addresses(ptr %args, ptr %left, i64 {_LEFT_BYTES}, i64 {_LEFT_ADDRESSES})
  %outs = call ptr @addresses(ptr %args, ptr %out, i64 {_RESULT_BYTES}, i64 {_RESULT_ADDRESSES})
  call void {{gemm_batch}}({_SIZES}, ptr %rights, ptr %right_row, ptr %lefts, ptr %left_row, ptr %beta, ptr %outs,
    ptr %result_row, ptr %groups, ptr %count_at)
  call void @restore(i32 %state)
  ret void
}}}}
"""
