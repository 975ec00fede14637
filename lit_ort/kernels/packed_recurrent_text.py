"""The LLVM text of the loops over time of recurrent layers whose rows are packed.

Sequences are sorted by their lengths, so that a step has the first so many of them. The rows of all steps are one
array, and a table has the number of rows and the start of each step, in the order in which the loop runs. A row whose
sequence begins in a step has no step before: its state is the one that the layer is given.
"""

from __future__ import annotations

from collections.abc import Callable

from lit_ort.kernels.recurrent_text import Array, Backward, Forward, Loop, Split
from lit_ort.kernels.vector_text import Text


def forward_text(mode: str, dtype: str, vector_bytes: int, is_packed: bool) -> Text:
    """`block` and `pack` of a layer's forward."""
    return (_PackedForward if is_packed else Forward)(mode, dtype, vector_bytes).write()


def backward_text(mode: str, dtype: str, vector_bytes: int, is_packed: bool) -> Text:
    """`block` and `pack` of a layer's gradient, whose steps are in reverse order."""
    return (_PackedBackward if is_packed else Backward)(mode, dtype, vector_bytes).write()


class _Packed(Loop):
    def rows_of(self, step: str) -> str:
        """The number of rows of a step; none before the first and after the last one."""
        return self._entry("step_rows", step)

    def _entry(self, name: str, step: str) -> str:
        pointer = self.text.value(f"getelementptr i64, ptr {self.argument(name, 'ptr')}, i64 {step}")
        return self.text.value(f"load i64, ptr {pointer}, align 8")

    def array(self, name: str, step: str | None = None, block: int = 0) -> Array:
        pointer, distance = super().array(name, None, block)
        if step is not None:
            pointer = self.at(pointer, self.op("mul", self._entry("step_starts", step), distance))
        return pointer, distance

    def before(self, test: str, step: str) -> tuple[Array | Split, Array | Split]:
        count = self.rows_of(step)
        state = Split(count, self.array("output", step), self.array("state"))
        if self.mode != "lstm":
            return state, state
        return state, Split(count, self.array("saved", step, 4), self.array("cell"))

    def each_group(self, body: Callable[[list[str]], None]) -> None:
        self.each_group_between("0", self.rows_of(self.step), body)

    def each_group_between(self, low: str, high: str, body: Callable[[list[str]], None]) -> None:
        """A loop over the groups with rows from `low` to below `high`.

        Blocks take groups in turns, since the first rows have the most steps. A row is in the same block in all steps.
        """
        blocks = self.argument("blocks")
        first = self.op("udiv", low, self.rows)
        ahead = self.op(
            "urem", self.op("sub", self.op("add", "%block", blocks), self.op("urem", first, blocks)), blocks
        )
        start = self.op("mul", self.op("add", first, ahead), self.rows)
        last = self.op("sub", high, 1)
        has_rows = self.text.value(f"icmp slt i64 {low}, {high}")
        end = self.text.value(f"select i1 {has_rows}, i64 {high}, i64 0")
        with self.text.loop(start, end, self.op("mul", blocks, self.rows)) as loop:
            rows = [self.minimum(self.op("add", loop.index, number), last) for number in range(self.rows)]
            body(rows if low == "0" else [self.maximum(row, low) for row in rows])


class _PackedForward(_Packed, Forward):
    pass


class _PackedBackward(_Packed, Backward):
    def _block(self) -> None:
        with self.text.loop("0", self.op("add", self.argument("steps"), 1), 1) as loop:
            self.step = loop.index
            count, ended = self.rows_of(loop.index), self.op("sub", loop.index, 1)
            self.each_columns(lambda: self._columns(loop.index, count, ended))
        self.text.line("ret void")

    def _columns(self, step: str, count: str, before: str) -> None:
        """The rows of a step, then those whose sequences ended in the step that ran before."""
        has_run = self.rows_of(before)
        later = self.array("gradients", before)
        both = Split(has_run, later, (self.argument("zeros", "ptr"), "0"))

        def run(rows: list[str]) -> None:
            has_later = self.text.value(f"icmp slt i64 {rows[0]}, {has_run}")
            depth = self.text.value(f"select i1 {has_later}, i64 {self.depth}, i64 0")
            self.steps(rows, step, self.carried(rows, depth, both))

        self.each_group_between("0", count, run)
        self.each_group_between(count, has_run, lambda rows: self.end(rows, self.carried(rows, self.depth, later)))
