"""The LLVM text of an output layer with its cross entropy, chunk by chunk, and of their gradients.

`run(arguments)` finds the rows whose labels are counted and computes a chunk of them at a time: a matmul of the logits;
row by row, the softmax in place of the logits, less one at the label; matmuls of the gradients. `rows(arguments,
number)` is a thread's part of a chunk.

Source: Liger Kernel (Hsu et al. 2024) for computing the gradients in the forward, chunk by chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from lit_ort.kernels.gemm_text import GemmText
from lit_ort.kernels.kernel_arguments import BAD_INDEX, ROW_BLOCKS
from lit_ort.kernels.loss_arguments import (
    BAD_LABEL,
    BUFFERS,
    CHUNK,
    CLASSES,
    COUNT,
    FIRST,
    GRADIENTS,
    IGNORED,
    IS_MEAN,
    MOST_BLOCKS,
    ROWS,
    TENSORS,
    TOTAL,
    WIDTH,
)
from lit_ort.kernels.vector_math import cast
from lit_ort.kernels.vector_memory import loaded, stored
from lit_ort.kernels.vector_text import Text, Vector
from lit_ort.regions.element_types import size_of

# Vectors at once, whose maxima and sums don't wait for each other.
_VECTORS = 4


def loss_text(dtype: str, factor: str, vector_bytes: int, gemm: int, on_threads: int) -> Text:
    """`run` and `rows` for a dtype.

    Args:
        dtype: of all values but the labels and the factors of matmuls.
        factor: the dtype of the factors.
        vector_bytes: the width of the CPU's vectors.
        gemm: the address of the matmul of BLAS.
        on_threads: that of a function of the arguments that computes all blocks.
    """
    return _LossText(dtype, factor, vector_bytes, gemm, f"inttoptr (i64 {on_threads} to ptr)").write()


class _LossText(GemmText):
    def __init__(self, dtype: str, factor: str, vector_bytes: int, gemm: int, on_threads: str) -> None:
        super().__init__(dtype, vector_bytes, gemm)
        self.factor, self.on_threads = factor, on_threads

    def write(self) -> Text:
        self.text.function("rows", "void @rows(ptr noalias %args, i64 %block)", self._rows)
        self.text.function("run", "void @run(ptr noalias %args)", self._run)
        return self.text

    # Arguments and memory.

    def word(self, position: int, kind: str = "i64") -> str:
        """A word of `%args`, some of which the function writes."""
        return self.text.effect(f"load {kind}, ptr {self.word_at(position)}, align 8")

    def keep(self, position: int, value: str) -> None:
        self.text.line(f"store i64 {value}, ptr {self.word_at(position)}, align 8")

    def tensor(self, name: str) -> str:
        """The address of a tensor; null for one that the call does not have."""
        place = self.word(TENSORS[name])
        address = self.text.effect(f"load ptr, ptr {self.word_at(place)}, align 8")
        return self.choose(self.is_zero(place), "ptr", "null", address)

    def buffer(self, name: str) -> str:
        """The address of a part of the call's working memory."""
        return self.text.value(f"getelementptr i8, ptr {self.tensor('scratch')}, i64 {self.word(BUFFERS[name])}")

    def factor_at(self, pointer: str, place: str) -> str:
        """The address of an element of a factor."""
        return self.at(pointer, place, self.factor)

    def element(self, pointer: str, place: str) -> Vector:
        return loaded(self.text, pointer, place, self.dtype, 0, None)

    def is_null(self, pointer: str) -> str:
        return self.text.value(f"icmp eq ptr {pointer}, null")

    def copy(self, target: str, source: str, bytes_: str) -> None:
        name = "llvm.memcpy.p0.p0.i64"
        self.text.call(name, "void", ("ptr", target), ("ptr", source), ("i64", bytes_), ("i1", "false"))

    def clear(self, target: str, elements: str) -> None:
        """Zeros in an array, if there is one."""
        with self.unless(self.is_null(target)):
            super().clear(target, elements)

    # The rows of a chunk.

    def _rows(self) -> None:
        text, classes, count = self.text, self.word(CLASSES), self.word(COUNT)
        blocks, first = self.word(ROW_BLOCKS), self.word(FIRST)
        low = self.op("udiv", self.op("mul", count, "%block"), blocks)
        high = self.op("udiv", self.op("mul", count, self.op("add", "%block", 1)), blocks)
        arrays = {name: self.tensor(name) for name in ("bias", "labels", "class_weight")}
        buffers = {name: self.buffer(name) for name in ("logits", "differences", "places", "losses")}
        total = Vector(text, self.word(TOTAL, "double"), "float64", 0)
        has_none = self._has_no_gradients()
        with text.loop(low, high, 1) as rows:
            logits = self.at(buffers["logits"], self.op("mul", rows.index, classes))
            place = self.integer(buffers["places"], self.op("add", first, rows.index))
            label = self.integer(arrays["labels"], place)
            share = self._share(arrays["class_weight"], label)
            self._add_bias(logits, arrays["bias"], classes)
            of_label = self.element(logits, label)
            largest = self._largest(logits, classes)
            exponentials = self._exponentials(logits, classes, largest)
            loss = cast(exponentials.log() + (largest - of_label), "float64") * share
            stored(text, buffers["losses"], rows.index, "float64", loss, None)
            with self.unless(has_none):
                scale = cast(share / total, self.dtype)
                factor = scale / exponentials
                difference = self.element(logits, label) * factor - scale
                differences = self.factor_at(buffers["differences"], self.op("mul", rows.index, classes))
                self._scale(logits, differences, classes, factor)
                stored(text, differences, label, self.factor, difference, None)
        text.line("ret void")

    def _has_no_gradients(self) -> str:
        missing = [self.is_null(self.tensor(name)) for name in GRADIENTS]
        return functools.reduce(lambda left, right: self.text.value(f"and i1 {left}, {right}"), missing)

    def _share(self, class_weight: str, label: str) -> Vector:
        """The weight of a row in the loss."""
        text = self.text
        has = Vector(text, text.value(f"icmp ne ptr {class_weight}, null"), "bool", 0)
        return has.where(cast(loaded(text, class_weight, label, self.dtype, 0, has), "float64"), 1.0)

    def _add_bias(self, logits: str, bias: str, classes: str) -> None:
        def body(at: str, mask: Vector | None, carried: Sequence[Vector]) -> list[Vector]:
            value = self._vector(logits, at, mask) + self._vector(bias, at, mask)
            stored(self.text, logits, at, self.dtype, value, mask)
            return []

        with self.unless(self.is_null(bias)):
            self._columns(classes, [], body)

    def _largest(self, logits: str, classes: str) -> Vector:
        lowest = self.text.literal(-math.inf, self.dtype, self.lanes)

        def body(at: str, mask: Vector | None, carried: Sequence[Vector]) -> list[Vector]:
            value = self._vector(logits, at, mask)
            return [carried[0].maximum(value if mask is None else mask.where(value, lowest))]

        (largest,) = self._columns(classes, [lowest], body, Vector.maximum)
        return largest.total("fmaximum", "nsz")

    def _exponentials(self, logits: str, classes: str, largest: Vector) -> Vector:
        """Their sum; they are written in place of the logits."""
        zero = self.text.literal(0.0, self.dtype, self.lanes)

        def body(at: str, mask: Vector | None, carried: Sequence[Vector]) -> list[Vector]:
            value = (self._vector(logits, at, mask) - largest).exp()
            stored(self.text, logits, at, self.dtype, value, mask)
            return [carried[0] + (value if mask is None else mask.where(value, zero))]

        (total,) = self._columns(classes, [zero], body, Vector.__add__)
        return total.total("fadd", "reassoc", 0.0)

    def _scale(self, logits: str, differences: str, classes: str, factor: Vector) -> None:
        def body(at: str, mask: Vector | None, carried: Sequence[Vector]) -> list[Vector]:
            stored(self.text, differences, at, self.factor, self._vector(logits, at, mask) * factor, mask)
            return []

        self._columns(classes, [], body)

    def _vector(self, pointer: str, at: str, mask: Vector | None) -> Vector:
        return loaded(self.text, pointer, at, self.dtype, self.lanes, mask)

    def _columns(
        self,
        count: str,
        carried: list[Vector],
        body: Callable[[str, Vector | None, Sequence[Vector]], list[Vector]],
        combine: Callable[[Vector, Vector], Vector] | None = None,
    ) -> list[Vector]:
        """A loop over vectors of columns, several at once, then over the rest.

        Args:
            count: the number of columns.
            carried: the value that `body` carries on, if it does.
            body: from the first column of a vector, which of its columns there are, and what is carried.
            combine: makes one of two carried values.

        Returns:
            What is carried at last.
        """
        text, step = self.text, _VECTORS * self.lanes
        whole = self.op("mul", self.op("udiv", count, step), step)
        with text.loop("0", whole, step, carried * _VECTORS) as loop:
            given = [loop.current[k : k + 1] for k in range(_VECTORS)]
            places = [self.op("add", loop.index, k * self.lanes) for k in range(_VECTORS)]
            loop.carry([value for at, own in zip(places, given, strict=True) for value in body(at, None, own)])
        found = [functools.reduce(combine, loop.current)] if combine is not None else []
        with text.loop(whole, count, self.lanes, found) as loop:
            loop.carry(body(loop.index, self.mask(self.op("sub", count, loop.index)), loop.current))
        return loop.current

    # The whole call.

    def _run(self) -> None:
        text, rows, width, classes = self.text, self.word(ROWS), self.word(WIDTH), self.word(CLASSES)
        names = ("hidden", "weight", "labels", "class_weight", "loss", *GRADIENTS)
        tensors = {name: self.tensor(name) for name in names}
        is_bad, selected = self._select(tensors["labels"], rows, classes)
        self.keep(BAD_INDEX, text.value(f"zext i1 {is_bad} to i64"))
        with self.unless(is_bad):
            self._set_total(tensors, selected)
            are_all = self.test("eq", selected, rows)
            with self.unless(are_all):
                self.clear(tensors["of_hidden"], self.op("mul", rows, width))
            with self.unless(self.test("ne", selected, 0)):
                self.clear(tensors["of_weight"], self.op("mul", classes, width))
                self.clear(tensors["of_bias"], classes)
            loss = self._chunks(tensors, selected, are_all)
            total = Vector(text, self.word(TOTAL, "double"), "float64", 0)
            stored(text, tensors["loss"], "0", self.dtype, cast(loss / total, self.dtype), None)
        text.line("ret void")

    def _select(self, labels: str, rows: str, classes: str) -> tuple[str, str]:
        """Whether a label is no class, which is kept; and the number of counted rows, whose numbers are kept."""
        text, places, ignored = self.text, self.buffer("places"), self.word(IGNORED)
        none = [Vector(text, "0", "int64", 0), Vector(text, "0", "int64", 0)]
        with text.loop("0", rows, 1, none) as loop:
            count, wrong = loop.current
            label = self.integer(labels, loop.index)
            is_counted = self.test("ne", label, ignored)
            is_outside = self.test("uge", label, classes)
            is_wrong = text.value(f"and i1 {is_counted}, {is_outside}")
            stored(text, places, count.name, "int64", Vector(text, loop.index, "int64", 0), None)
            is_first = text.value(f"and i1 {is_wrong}, {self.is_zero(wrong.name)}")
            self.keep(BAD_LABEL, self.choose(is_first, "i64", label, self.word(BAD_LABEL)))
            added, bad = (text.value(f"zext i1 {test} to i64") for test in (is_counted, is_wrong))
            loop.carry([count + Vector(text, added, "int64", 0), wrong | Vector(text, bad, "int64", 0)])
        count, wrong = loop.current
        return self.test("ne", wrong.name, 0), count.name

    def _set_total(self, tensors: Mapping[str, str], selected: str) -> None:
        """What the sum of the losses is divided by."""
        text, places = self.text, self.buffer("places")
        with text.loop("0", selected, 1, [text.literal(0.0, "float64")]) as loop:
            label = self.integer(tensors["labels"], self.integer(places, loop.index))
            loop.carry([loop.current[0] + self._share(tensors["class_weight"], label)])
        total = loop.current[0].name
        is_sum = self.is_zero(self.word(IS_MEAN))
        total = self.choose(is_sum, "double", text.literal(1.0, "float64").name, total)
        text.line(f"store double {total}, ptr {self.word_at(TOTAL)}, align 8")

    def _chunks(self, tensors: Mapping[str, str], selected: str, are_all: str) -> Vector:
        """Computes all chunks; returns the sum of the losses."""
        text, ones = self.text, self.buffer("ones")
        size = self._chunk_size(selected)
        with text.loop("0", size, 1) as loop:
            stored(text, ones, loop.index, self.factor, text.literal(1.0, self.dtype), None)
        with text.loop("0", selected, size, [text.literal(0.0, "float64")]) as chunk:
            count = self.minimum(self.op("sub", selected, chunk.index), size)
            self.keep(FIRST, chunk.index)
            self.keep(COUNT, count)
            self.keep(ROW_BLOCKS, self.minimum(count, MOST_BLOCKS))
            hidden = self._hidden(tensors["hidden"], chunk.index, count, are_all)
            logits, classes, width = self.buffer("logits"), self.word(CLASSES), self.word(WIDTH)
            self.multiply((hidden, width, False), (tensors["weight"], width, True), logits, (count, classes, width))
            text.line(f"call void {self.on_threads}(ptr %args)")
            self._gradients(tensors, hidden, chunk.index, count, are_all)
            chunk.carry([self._sum(chunk.current[0], count)])
        return chunk.current[0]

    def _chunk_size(self, selected: str) -> str:
        """The rows of all chunks but the last one: the fewest chunks, of equal sizes."""
        count = self.divided_up(selected, self.word(CHUNK))
        return self.maximum(self.divided_up(selected, self.maximum(count, 1)), 1)

    def _hidden(self, hidden: str, first: str, count: str, are_all: str) -> str:
        """The address of the rows of a chunk, which are copied if others are between them."""
        width, buffer = self.word(WIDTH), self.buffer("rows")
        with self.unless(are_all), self._each_row(first, count) as (place, own):
            size = self.op("mul", width, size_of(self.factor))
            self.copy(self.factor_at(buffer, own), self.factor_at(hidden, place), size)
        return self.choose(are_all, "ptr", self.factor_at(hidden, self.op("mul", first, width)), buffer)

    def _gradients(self, tensors: Mapping[str, str], hidden: str, first: str, count: str, are_all: str) -> None:
        differences, classes, width = self.buffer("differences"), self.word(CLASSES), self.word(WIDTH)
        is_later = self.test("ne", first, 0)
        with self.unless(self.is_null(tensors["of_weight"])):
            factors = (differences, classes, True), (hidden, width, False)
            self.multiply(*factors, tensors["of_weight"], (classes, width, count), is_later)
        with self.unless(self.is_null(tensors["of_bias"])):
            factors = (self.buffer("ones"), count, False), (differences, classes, False)
            self.multiply(*factors, tensors["of_bias"], ("1", classes, count), is_later)
        of_hidden = tensors["of_hidden"]
        with self.unless(self.is_null(of_hidden)):
            # The rows of the chunk have been read.
            buffer = self.buffer("rows")
            target = self.choose(are_all, "ptr", self.at(of_hidden, self.op("mul", first, width)), buffer)
            factors = (differences, classes, False), (tensors["weight"], width, False)
            self.multiply(*factors, target, (count, width, classes))
            with self.unless(are_all), self._each_row(first, count) as (place, own):
                self.copy(self.at(of_hidden, place), self.at(buffer, own), self.op("mul", width, self.size))

    @contextmanager
    def _each_row(self, first: str, count: str) -> Iterator[tuple[str, str]]:
        """A loop over the rows of a chunk: where each begins among all rows, and in the chunk."""
        places, width = self.buffer("places"), self.word(WIDTH)
        with self.text.loop("0", count, 1) as loop:
            place = self.integer(places, self.op("add", first, loop.index))
            yield self.op("mul", place, width), self.op("mul", loop.index, width)

    def _sum(self, total: Vector, count: str) -> Vector:
        text, losses = self.text, self.buffer("losses")
        with text.loop("0", count, 1, [total]) as loop:
            loop.carry([loop.current[0] + loaded(text, losses, loop.index, "float64", 0, None)])
        return loop.current[0]
