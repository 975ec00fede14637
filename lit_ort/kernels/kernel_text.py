"""What the LLVM texts of kernels that are written by hand have in common: arithmetic on names, memory, branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from lit_ort.kernels.kernel_arguments import ROW_BLOCKS
from lit_ort.kernels.vector_math import cast
from lit_ort.kernels.vector_memory import address_of, loaded
from lit_ort.kernels.vector_text import Text, Vector
from lit_ort.regions.element_types import size_of


class KernelText:
    """A text that is being written.

    Args:
        dtype: of the elements.
        vector_bytes: the width of the CPU's vectors.

    Attributes:
        size: of an element, in bytes.
        lanes: the elements of a vector.
    """

    def __init__(self, dtype: str, vector_bytes: int) -> None:
        self.text, self.dtype, self.size = Text(), dtype, size_of(dtype)
        self.lanes = vector_bytes // self.size

    # Of 64-bit integers.

    def op(self, operation: str, left: str | int, right: str | int) -> str:
        return self.text.value(f"{operation} i64 {left}, {right}")

    def minimum(self, left: str | int, right: str | int) -> str:
        return self.text.call("llvm.smin.i64", "i64", ("i64", str(left)), ("i64", str(right)))

    def maximum(self, left: str | int, right: str | int) -> str:
        return self.text.call("llvm.smax.i64", "i64", ("i64", str(left)), ("i64", str(right)))

    def divided_up(self, left: str, right: str | int) -> str:
        """left / right, rounded up."""
        rest = right - 1 if isinstance(right, int) else self.op("sub", right, 1)
        return self.op("udiv", self.op("add", left, rest), right)

    def share(self, count: str, unit: int) -> tuple[str, str]:
        """The first and the last of what this block computes, in units."""
        blocks = self.word(ROW_BLOCKS)
        units = self.divided_up(count, unit)
        ends = []
        for number in ("%block", self.op("add", "%block", 1)):
            end = self.op("mul", self.op("udiv", self.op("mul", units, number), blocks), unit)
            ends.append(self.minimum(end, count))
        return ends[0], ends[1]

    def test(self, relation: str, left: str, right: str | int) -> str:
        return self.text.value(f"icmp {relation} i64 {left}, {right}")

    def is_zero(self, value: str) -> str:
        return self.test("eq", value, 0)

    def choose(self, test: str, kind: str, chosen: str | int, other: str | int) -> str:
        return self.text.value(f"select i1 {test}, {kind} {chosen}, {kind} {other}")

    # Memory.

    def word_at(self, position: int | str) -> str:
        """The address of a word of `%args`."""
        return self.text.value(f"getelementptr i64, ptr %args, i64 {position}")

    def word(self, position: int, kind: str = "i64") -> str:
        """A word of `%args`, which nothing writes while the function runs."""
        return self.text.value(f"load {kind}, ptr {self.word_at(position)}, align 8")

    def at(self, pointer: str, place: str | int, dtype: str | None = None) -> str:
        """The address of an element, of this dtype or of another one."""
        return address_of(self.text, pointer, place, dtype or self.dtype)

    def integer(self, pointer: str, place: str, dtype: str = "int64") -> str:
        """An element of an array of integers."""
        value = loaded(self.text, pointer, place, dtype, 0, None)
        return cast(value, "int64").name

    def clear(self, target: str, elements: str) -> None:
        """Writes zeros to an array."""
        size = ("i64", self.op("mul", elements, self.size))
        self.text.call("llvm.memset.p0.i64", "void", ("ptr", target), ("i8", "0"), size, ("i1", "false"))

    def mask(self, count: str, lanes: int | None = None) -> Vector:
        """The first lanes, of as many as a vector has or of another number."""
        lanes = lanes or self.lanes
        left = Vector(self.text, self.text.value(f"trunc i64 {self.minimum(count, lanes)} to i32"), "int32", 0)
        return self.text.indices("0", lanes, "int32").lt(left)

    # Branches.

    @contextmanager
    def branch(self, test: str) -> Iterator[Callable[[], None]]:
        """What runs if a test is True; after a call of what is returned, what runs if it is False."""
        text, number = self.text, self.text.name()[2:]
        names = [f"{part}{number}" for part in ("then", "else", "after")]
        text.line(f"br i1 {test}, label %{names[0]}, label %{names[1]}")
        with ExitStack() as scopes:

            def begin(name: str) -> None:
                scopes.close()
                text.label(name)
                scopes.enter_context(text.scope())

            def otherwise() -> None:
                text.line(f"br label %{names[-1]}")
                begin(names.pop(1))

            begin(names[0])
            yield otherwise
            if len(names) == 3:
                otherwise()
            text.line(f"br label %{names[-1]}")
        text.label(names[-1])

    @contextmanager
    def unless(self, test: str) -> Iterator[None]:
        """What runs if a test is False."""
        with self.branch(test) as otherwise:
            otherwise()
            yield
