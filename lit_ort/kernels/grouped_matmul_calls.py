"""Matmuls of groups of rows as kernels of native sessions, as the experts of a mixture compute them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from lit_ort.kernels.grouped_matmul_text import (
    GROUPS,
    LEFT,
    LEFT_COLUMNS,
    RIGHT_COLUMNS,
    ROWS,
    WORDS,
    grouped_matmul_text,
)
from lit_ort.kernels.kernel_arguments import DTYPES, END_DTYPES, WORD
from lit_ort.kernels.kernel_calls import KernelCache
from lit_ort.kernels.machine_code import MachineCode
from lit_ort.kernels.operator_entry import CallWords


@dataclass(frozen=True)
class GroupedMatmul:
    """Matmuls of groups of contiguous rows.

    Args:
        dtype: of the factors.
        ends_dtype: of the ends of groups.
        groups, rows: the numbers of groups, and of the rows of all.
        columns: of the left and of the right factor.
        is_gradient: whether both factors have rows, and each group's transposed rows are multiplied; otherwise the
            right factor has a matrix for each group.
        transposed: whether these matrices are stored as their transposes.
    """

    dtype: torch.dtype
    ends_dtype: torch.dtype
    groups: int
    rows: int
    columns: tuple[int, int]
    is_gradient: bool
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (self.groups, *self.columns) if self.is_gradient else (self.rows, self.columns[1])

    @property
    def function(self) -> str:
        if self.is_gradient:
            return "gradient"
        return "transposed" if self.transposed else "matmul"


class GroupedMatmulCode:
    """The machine code of matmuls of groups.

    Args:
        kernels: of this process.
    """

    def __init__(self, kernels: KernelCache) -> None:
        self._kernels = kernels
        self._codes = dict[tuple[torch.dtype, torch.dtype], MachineCode]()

    def address(self, matmul: GroupedMatmul) -> int:
        """The address of the function that computes a matmul."""
        key = matmul.dtype, matmul.ends_dtype
        if key not in self._codes:
            cpu = self._kernels.cpu
            gemm = self._kernels.matmuls.functions(matmul.dtype).gemm
            text = grouped_matmul_text(DTYPES[matmul.dtype], END_DTYPES[matmul.ends_dtype], cpu.vector_bytes, gemm)
            # Addresses are those of the code that is kept, if several threads make one.
            self._codes.setdefault(key, MachineCode(str(text), cpu))
        return self._codes[key].address(matmul.function)


class GroupedMatmulCallWords(CallWords):
    """The words of calls of matmuls of groups.

    Args:
        code: of these matmuls.
        matmul: the matmul.
    """

    def __init__(self, code: GroupedMatmulCode, matmul: GroupedMatmul) -> None:
        self._arguments = words = (ctypes.c_int64 * WORDS)()
        left, right = matmul.columns
        values = {GROUPS: matmul.groups, ROWS: matmul.rows, LEFT_COLUMNS: left, RIGHT_COLUMNS: right}
        for position, value in values.items():
            words[position] = value
        address = ctypes.addressof(words)
        super().__init__(3, [matmul.shape], address, address + WORD * LEFT, code.address(matmul))
