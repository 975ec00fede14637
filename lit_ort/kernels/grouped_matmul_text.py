"""The LLVM text of matmuls of groups of rows: each group of the left factor has a matrix of its own.

The groups are consecutive rows, and where each ends is read at run time: group k has the rows from the end of group
k - 1 to its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from lit_ort.kernels.gemm_text import GemmText
from lit_ort.kernels.kernel_arguments import FINISH_FUNCTION
from lit_ort.kernels.vector_text import Text, Vector

# Sizes: the groups, the rows of all, and the columns of both factors.
GROUPS, ROWS, LEFT_COLUMNS, RIGHT_COLUMNS = range(FINISH_FUNCTION + 1, FINISH_FUNCTION + 5)
# The addresses of the factors, of the groups' ends and of the result, in the order of a call's inputs and outputs.
LEFT, RIGHT, ENDS, RESULT = range(FINISH_FUNCTION + 5, FINISH_FUNCTION + 9)
WORDS = FINISH_FUNCTION + 9


def grouped_matmul_text(dtype: str, ends_dtype: str, vector_bytes: int, gemm: int) -> Text:
    """`matmul`, `transposed` (of matrices that are stored as their transposes) and `gradient`.

    Args:
        dtype: of the factors.
        ends_dtype: of the groups' ends.
        vector_bytes: the width of the CPU's vectors.
        gemm: the address of the matmul of BLAS.
    """
    return _GroupedMatmulText(dtype, ends_dtype, vector_bytes, gemm).write()


class _Group(NamedTuple):
    """Names of the number of a group, of its first row, and of the number of its rows."""

    number: str
    first: str
    rows: str


class _GroupedMatmulText(GemmText):
    def __init__(self, dtype: str, ends_dtype: str, vector_bytes: int, gemm: int) -> None:
        super().__init__(dtype, vector_bytes, gemm)
        self.ends_dtype = ends_dtype

    def write(self) -> Text:
        for name, is_transposed in (("matmul", False), ("transposed", True)):
            self.text.function(name, f"void @{name}(ptr noalias %args)", lambda form=is_transposed: self._matmul(form))
        self.text.function("gradient", "void @gradient(ptr noalias %args)", self._gradient)
        return self.text

    def _matmul(self, is_transposed: bool) -> None:
        """The rows of each group times its matrix. Rows after the last group are zero."""
        inner, columns, rows = self.word(LEFT_COLUMNS), self.word(RIGHT_COLUMNS), self.word(ROWS)
        left, right, result = (self.word(position, "ptr") for position in (LEFT, RIGHT, RESULT))
        elements = self.op("mul", inner, columns)
        with self._groups() as (group, covered), self.unless(self.is_zero(group.rows)):
            own = self.at(left, self.op("mul", group.first, inner)), inner, False
            matrix = self.at(right, self.op("mul", group.number, elements))
            target = self.at(result, self.op("mul", group.first, columns))
            factor = (matrix, inner if is_transposed else columns, is_transposed)
            self.multiply(own, factor, target, (group.rows, columns, inner))
        rest = self.op("mul", self.op("sub", rows, covered[0].name), columns)
        self.clear(self.at(result, self.op("mul", covered[0].name, columns)), rest)
        self.text.line("ret void")

    def _gradient(self) -> None:
        """The transpose of each group's rows times the other factor's: a matrix for each group."""
        rows, columns = self.word(LEFT_COLUMNS), self.word(RIGHT_COLUMNS)
        left, right, result = (self.word(position, "ptr") for position in (LEFT, RIGHT, RESULT))
        elements = self.op("mul", rows, columns)
        with self._groups() as (group, _):
            target = self.at(result, self.op("mul", group.number, elements))
            with self.branch(self.is_zero(group.rows)) as otherwise:
                self.clear(target, elements)
                otherwise()
                transposed = self.at(left, self.op("mul", group.first, rows)), rows, True
                own = self.at(right, self.op("mul", group.first, columns)), columns, False
                self.multiply(transposed, own, target, (rows, columns, group.rows))
        self.text.line("ret void")

    @contextmanager
    def _groups(self) -> Iterator[tuple[_Group, list[Vector]]]:
        """A loop over groups, with a list that has the end of all of them after it.

        An end outside the rows counts as the nearest one inside, as a slice's.
        """
        groups, rows, ends = self.word(GROUPS), self.word(ROWS), self.word(ENDS, "ptr")
        zero = Vector(self.text, "0", "int64", 0)
        covered = list[Vector]()
        with self.text.loop("0", groups, 1, [zero, zero]) as loop:
            first, most = (vector.name for vector in loop.current)
            end = self.maximum(self.minimum(self.integer(ends, loop.index, self.ends_dtype), rows), 0)
            yield _Group(loop.index, first, self.maximum(self.op("sub", end, first), 0)), covered
            loop.carry([Vector(self.text, name, "int64", 0) for name in (end, self.maximum(most, end))])
        covered.append(loop.current[1])
