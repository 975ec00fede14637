"""The LLVM text of matmuls, with the interface of BLAS: for CPUs whose vectors MKL does not use at full width.

The result is computed in tiles that stay in registers. For each tile, a loop over the inner size reads elements of a
panel of the left factor and vectors of a panel of the right one, which have been copied so that they follow each
other. A thread computes some rows, some columns, or some matrices of a batch.

Source: Goto and van de Geijn 2008 (panels and the order of loops); Van Zee and van de Geijn 2015 (BLIS, microkernels).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lit_ort.kernels import matmul_arguments as words
from lit_ort.kernels.kernel_arguments import BLOCK_FUNCTION, COLUMN_BLOCKS, FINISH_FUNCTION, ROW_BLOCKS
from lit_ort.kernels.kernel_text import KernelText
from lit_ort.kernels.thread_pool import DENORMALS
from lit_ort.kernels.vector_memory import loaded, stored
from lit_ort.kernels.vector_text import Text, Vector

# The rows of a tile, by the width of vectors in bytes; it has two vectors of columns.
ROWS = {16: 8, 32: 6, 64: 12}
VECTORS = 2
# What is copied at a time has so many rows and columns of the right factor at most, and so many rows of the left one.
INNER, _COLUMNS, _LEFT_ROWS = 256, 256, 96
# Threads with small stacks end at their guard pages.
CHECKS_STACK = '"probe-stack"="inline-asm"'
# So many products are added in registers, and then to the result: the rounding errors of long sums add up.
SUMMED = 128
_TRANSPOSED = ord("T")
# Multiplications; for fewer, threads cost more than they save.
_SMALL = 2**18
# Reads the elements of a factor's row from a place on, those that a mask has.
Row = Callable[[str, Vector | None], Vector]


def matmul_text(dtype: str, vector_bytes: int, on_threads: str, most_threads: str | None) -> Text:
    """`gemm` and `gemm_batch` for a dtype, as in BLAS, with factors alpha of one and beta of zero or one.

    Args:
        dtype: of all values.
        vector_bytes: the width of the CPU's vectors.
        on_threads: what calls a function of a block of arguments that computes all its blocks.
        most_threads: what calls a function that returns the number of threads; None for one thread.
    """
    return MatmulText(dtype, vector_bytes).write(on_threads, most_threads)


class MatmulText(KernelText):
    """The text of matmuls that is being written.

    Args:
        dtype: of the result, and of the elements of panels.
        vector_bytes: the width of the CPU's vectors.
        factor: the dtype of the elements of factors, if it is another one.

    Attributes:
        rows, columns: of a tile.
        unit: the elements of a factor along the inner dimension that one element of a panel holds.
    """

    unit = 1

    def __init__(self, dtype: str, vector_bytes: int, factor: str | None = None) -> None:
        super().__init__(dtype, vector_bytes)
        self.factor = factor or dtype
        self.rows, self.columns = ROWS[vector_bytes], VECTORS * self.lanes

    def write(self, on_threads: str, most_threads: str | None) -> Text:
        """Writes `gemm` and `gemm_batch`; the arguments are those of `matmul_text`."""
        self._write_block()
        count = "add i32 0, 1" if most_threads is None else f"call i32 {most_threads}()"
        names = {"on_threads": on_threads, "thread_count": count, "bits": f"i{8 * self.size}"}
        names |= {"columns": str(self.columns), "rows": str(self.rows)}
        self.text.functions["gemm"] = _GEMM.format_map(names)
        return self.text

    def _write_block(self) -> None:
        """Writes `block`, which computes a part of a matmul."""
        text = self.text
        text.functions["denormals"] = DENORMALS
        tile = "ptr %left, ptr %right, i64 %right_step, ptr %result, i64 %row, i64 %inner"
        sizes = "i64 %rows, i64 %columns, i64 %is_added"
        text.function("tile", f"internal void @tile({tile}, {sizes})", self._tile, "noinline")
        part = "ptr %args, ptr %left, ptr %right, ptr %result, ptr %panel, ptr %left_panel"
        ranges = "i64 %first_row, i64 %last_row, i64 %first_column, i64 %last_column"
        text.function("part", f"internal void @part({part}, {ranges})", self._part, "noinline")
        text.function("block", "internal void @block(ptr %args, i64 %block)", self._block, CHECKS_STACK)

    # Memory.

    def vector(self, pointer: str, mask: Vector | None = None) -> Vector:
        return loaded(self.text, pointer, "0", self.dtype, self.lanes, mask)

    # Factors: what a panel has of them.

    def factor_at(self, pointer: str, place: str | int) -> str:
        """The address of an element of a factor."""
        return self.at(pointer, place, self.factor)

    def along_inner(self, source: str, mask: Vector) -> Vector:
        """A vector of a panel's elements, of neighbours along the inner dimension; `mask` is `inner_mask`'s."""
        return loaded(self.text, source, "0", self.factor, self.lanes, mask)

    def inner_mask(self, count: str) -> Vector:
        """Which elements of a factor there are, of those that `along_inner` reads."""
        return self.mask(count)

    def across_inner(self, pointer: str, row: str, last: str, distance: str) -> Row:
        """Reads vectors of a panel's elements of one place along the inner dimension.

        Args:
            pointer: the address of the factor.
            row: the place in the factor.
            last: where the inner dimension ends.
            distance: of neighbours along the inner dimension.
        """
        source = self.factor_at(pointer, self.op("mul", row, distance))
        return lambda place, mask: loaded(self.text, source, place, self.factor, self.lanes, mask)

    def multiply_add(self, left: Vector, right: Vector, total: Vector) -> Vector:
        """The total and the products of two panels' elements."""
        return left.fma(right, total)

    def steps(self, depth: str) -> str:
        """The elements of a panel for elements of a factor along the inner dimension."""
        return self.divided_up(depth, self.unit)

    # A tile.

    def _tile(self) -> None:
        """Some rows and columns of the result, from a panel of each factor.

        The rows of the right panel are `right_step` apart. Rows and columns beyond the last ones are not stored.
        """
        text = self.text
        with text.loop("0", self.maximum("%inner", 1), SUMMED) as part:
            later = text.value(f"zext i1 {self.test('ne', part.index, 0)} to i64")
            end = self.minimum("%inner", self.op("add", part.index, SUMMED))
            self._partial_sums(part.index, end, self.op("or", "%is_added", later))
        text.line("ret void")

    def _partial_sums(self, start: str, end: str, is_added: str) -> None:
        text = self.text
        zero = text.literal(0.0, self.dtype, self.lanes)
        with text.loop(start, end, 1, [zero] * (self.rows * VECTORS)) as loop:
            loop.carry(self._products(loop.index, loop.current))
        self.store_tile(loop.current, is_added)

    def store_tile(self, totals: Sequence[Vector], is_added: str) -> None:
        """Stores or adds sums, of the first `%rows` and `%columns` of a tile."""
        columns = len(totals) // self.rows * self.lanes
        is_whole = self.text.value(
            f"and i1 {self.test('sge', '%rows', self.rows)}, {self.test('sge', '%columns', columns)}"
        )
        with self.branch(is_whole) as otherwise:
            self._store(totals, is_added)
            otherwise()
            self._store_some(totals, is_added)

    def _products(self, k: str, totals: Sequence[Vector]) -> list[Vector]:
        right = self.at("%right", self.op("mul", k, "%right_step"))
        vectors = [self.vector(self.at(right, number * self.lanes)) for number in range(VECTORS)]
        left, result = self.at("%left", self.op("mul", k, self.rows)), []
        for row in range(self.rows):
            factor = loaded(self.text, left, str(row), self.dtype, 0, None).splat(self.lanes)
            added = totals[row * VECTORS : (row + 1) * VECTORS]
            pairs = zip(vectors, added, strict=True)
            result += [self.multiply_add(factor, vector, total) for vector, total in pairs]
        return result

    def result_rows(self) -> list[str]:
        """The addresses of the rows of a tile."""
        return [self.at("%result", self.op("mul", "%row", row)) for row in range(self.rows)]

    def _places(self, vectors: int) -> list[list[str]]:
        return [[self.at(row, number * self.lanes) for number in range(vectors)] for row in self.result_rows()]

    def _store(self, totals: Sequence[Vector], is_added: str) -> None:
        places = [place for row in self._places(len(totals) // self.rows) for place in row]
        with self.branch(self.test("ne", is_added, 0)) as otherwise:
            for place, total in zip(places, totals, strict=True):
                stored(self.text, place, "0", self.dtype, self.vector(place) + total, None)
            otherwise()
            for place, total in zip(places, totals, strict=True):
                stored(self.text, place, "0", self.dtype, total, None)

    def _store_some(self, totals: Sequence[Vector], is_added: str) -> None:
        vectors = len(totals) // self.rows
        added = Vector(self.text, self.test("ne", is_added, 0), "bool", 0)
        widths = [self.op("sub", "%columns", number * self.lanes) for number in range(vectors)]
        masks = [self.mask(width) for width in widths]
        for row, places in enumerate(self._places(vectors)):
            with self.branch(self.test("sgt", "%rows", row)):
                for number, place in enumerate(places):
                    mask = masks[number]
                    total = totals[row * vectors + number] + self.vector(place, mask & added)
                    # Stores under masks are slow on some CPUs.
                    with self.branch(self.test("sge", widths[number], self.lanes)) as otherwise:
                        stored(self.text, place, "0", self.dtype, total, None)
                        otherwise()
                        stored(self.text, place, "0", self.dtype, total, mask)

    # The part of a block.

    def _block(self) -> None:
        text, axis = self.text, self.word(words.AXIS)
        state = text.effect("call i32 @without_denormals()")
        # Panels of the right factor, then of the left one.
        elements = (INNER + self.lanes) * (_COLUMNS + self.columns)
        left_elements = (_LEFT_ROWS // self.rows + 1) * self._left_panel
        panels = text.effect(f"alloca i8, i64 {(elements + left_elements) * self.size}, align 64")
        given = [f"ptr {panels}", f"ptr {self.at(panels, elements)}"]
        tensors = [self.word(position, "ptr") for position in (words.LEFT, words.RIGHT, words.RESULT)]
        rows, columns = self.word(words.ROWS), self.word(words.COLUMNS)
        with self.branch(self.test("eq", axis, words.BY_MATRICES)) as otherwise:
            low, high = self.share(self.word(words.COUNT), 1)
            with text.loop(low, high, 1) as loop:
                slots = [text.value(f"getelementptr ptr, ptr {array}, i64 {loop.index}") for array in tensors]
                pointers = [f"ptr {text.effect(f'load ptr, ptr {slot}, align 8')}" for slot in slots]
                ranges = [f"i64 {bound}" for bound in (0, rows, 0, columns)]
                text.line(f"call void @part({', '.join(('ptr %args', *pointers, *given, *ranges))})")
            otherwise()
            by_rows = self.test("eq", axis, words.BY_ROWS)
            pairs = [self.share(rows, self.rows), ("0", rows), ("0", columns), self.share(columns, self.columns)]
            ranges = []
            for chosen, other in ((pairs[0], pairs[1]), (pairs[2], pairs[3])):
                ranges += [self.choose(by_rows, "i64", a, b) for a, b in zip(chosen, other, strict=True)]
            pointers = [f"ptr {tensor}" for tensor in tensors]
            bounds = [f"i64 {bound}" for bound in ranges]
            text.line(f"call void @part({', '.join(('ptr %args', *pointers, *given, *bounds))})")
        text.line(f"call void @restore(i32 {state})")
        text.line("ret void")

    @property
    def _left_panel(self) -> int:
        """The elements of a panel of the left factor; the last vectors that are written have lanes beyond it."""
        return (INNER + self.lanes) * self.rows + self.lanes

    def _part(self) -> None:
        text, inner = self.text, self.word(words.INNER)
        # Without elements to multiply, the result is zero.
        end = self.maximum(inner, 1)
        # Columns that are read for one tile alone are read where they are, unless they are rows in memory, or a panel
        # has other elements.
        is_low = self.test("sle", self.op("sub", "%last_row", "%first_row"), self.rows)
        is_in_place = "false"
        if self.factor == self.dtype:
            is_in_place = text.value(f"and i1 {is_low}, {self.test('eq', self.word(words.RIGHT_COLUMN), 1)}")
        with text.loop("0", end, INNER * self.unit) as outer:
            depth = self.minimum(self.op("sub", inner, outer.index), INNER * self.unit)
            is_later = text.value(f"zext i1 {self.test('ne', outer.index, 0)} to i64")
            is_added = self.op("or", is_later, self.word(words.IS_ADDED))
            with text.loop("%first_column", "%last_column", _COLUMNS) as columns:
                last = self.minimum(self.op("add", columns.index, _COLUMNS), "%last_column")
                # The columns that are read in place.
                whole = self.op("mul", self.op("udiv", self.op("sub", last, columns.index), self.columns), self.columns)
                given = self.op("add", columns.index, self.choose(is_in_place, "i64", whole, 0))
                self.pack_right(outer.index, depth, given, last)
                with text.loop("%first_row", "%last_row", _LEFT_ROWS) as rows:
                    last_row = self.minimum(self.op("add", rows.index, _LEFT_ROWS), "%last_row")
                    with self.branch(self.test("eq", self.word(words.LEFT_COLUMN), 1)) as otherwise:
                        self._pack_left(outer.index, depth, rows.index, last_row)
                        otherwise()
                        self._pack_transposed_left(outer.index, depth, rows.index, last_row)
                    block = (columns.index, given, last), (rows.index, last_row)
                    self._tiles(outer.index, depth, *block, is_added)
        text.line("ret void")

    def _tiles(
        self, start: str, depth: str, columns: tuple[str, str, str], rows: tuple[str, str], is_added: str
    ) -> None:
        """The tiles of a block: of columns of which the first ones are read in place, and of rows."""
        text, (first, copied, last), row_length = self.text, columns, self.word(words.RESULT_ROW)
        right_row = self.word(words.RIGHT_ROW)
        with text.loop(first, last, self.columns) as column:
            is_copied = self.test("sge", column.index, copied)
            panel = self.at("%panel", self.op("mul", self.op("sub", column.index, copied), INNER))
            place = self.at("%right", self.op("add", self.op("mul", start, right_row), column.index))
            right = self.choose(is_copied, "ptr", panel, place)
            step = self.choose(is_copied, "i64", self.columns, right_row)
            width = self.op("sub", last, column.index)
            with self._each_tile(*rows) as (row, left):
                result = self.at("%result", self.op("add", self.op("mul", row, row_length), column.index))
                given = f"ptr {left}, ptr {right}, i64 {step}, ptr {result}, i64 {row_length}"
                sizes = f"i64 {self.steps(depth)}, i64 {self.op('sub', rows[1], row)}, i64 {width}, i64 {is_added}"
                text.line(f"call void @tile({given}, {sizes})")

    @contextmanager
    def _each_tile(self, first: str, last: str) -> Iterator[tuple[str, str]]:
        """A loop over tiles of rows: the first row of each, and the address of its panel."""
        count = self.divided_up(self.op("sub", last, first), self.rows)
        with self.text.loop("0", count, 1) as loop:
            row = self.op("add", first, self.op("mul", loop.index, self.rows))
            yield row, self.at("%left_panel", self.op("mul", loop.index, self._left_panel))

    # Panels.

    def _pack_left(self, start: str, depth: str, first: str, last: str) -> None:
        """The columns of some rows, one after the other; rows beyond the last one are that one again."""
        text, distance, final = self.text, self.word(words.LEFT_ROW), self.op("sub", last, 1)
        with self._each_tile(first, last) as (row, panel):
            rows = [self.minimum(self.op("add", row, number), final) for number in range(self._whole_rows)]
            places = [self.factor_at("%left", self.op("add", self.op("mul", one, distance), start)) for one in rows]
            with self._each_vector(depth) as (k, vector):
                vectors = [vector(place) for place in places]
                parts = [self._transposed(vectors[at : at + self.lanes]) for at in range(0, len(rows), self.lanes)]
                target = self.at(panel, self.op("mul", k, self.rows))
                # What is written beyond the rows of a tile is written again by the next column.
                for column in range(self.lanes):
                    for number, part in enumerate(parts):
                        place = self.at(target, column * self.rows + number * self.lanes)
                        stored(text, place, "0", self.dtype, part[column], None)

    @property
    def _whole_rows(self) -> int:
        """The rows of a tile, up to a whole vector."""
        return -(-self.rows // self.lanes) * self.lanes

    @contextmanager
    def _each_vector(self, depth: str) -> Iterator[tuple[str, Callable[[str], Vector]]]:
        """A loop over vectors of the inner dimension: the first element of each in a panel, and what reads it."""
        with self.text.loop("0", self.steps(depth), self.lanes) as loop:
            place = self.op("mul", loop.index, self.unit)
            mask = self.inner_mask(self.op("sub", depth, place))
            yield loop.index, lambda source: self.along_inner(self.factor_at(source, place), mask)

    def _pack_transposed_left(self, start: str, depth: str, first: str, last: str) -> None:
        """Rows of a factor that is stored as its transpose, so that what follows each other are rows."""
        distance, total = self.word(words.LEFT_COLUMN), self.word(words.ROWS)
        with self._each_row("%left", start, depth, distance) as (k, row_of_factor):
            offset = self.op("mul", k, self.rows)
            with self._each_tile(first, last) as (row, panel):
                target = self.at(panel, offset)
                with self.branch(self.test("sle", self.op("add", row, self._whole_rows), total)) as otherwise:
                    self._copy_vectors(target, row_of_factor, row, None)
                    otherwise()
                    self._copy_vectors(target, row_of_factor, row, self.op("sub", total, row))

    @contextmanager
    def _each_row(self, pointer: str, start: str, depth: str, distance: str) -> Iterator[tuple[str, Row]]:
        """A loop over the inner dimension of a factor: the place in a panel, and what reads a factor's row there."""
        with self.text.loop("0", self.steps(depth), 1) as loop:
            place = self.op("mul", loop.index, self.unit)
            last = self.op("add", start, depth)
            yield loop.index, self.across_inner(pointer, self.op("add", start, place), last, distance)

    def _copy_vectors(self, target: str, row: Row, first: str, count: str | None) -> None:
        for begin in range(0, self.rows, self.lanes):
            mask = None if count is None else self.mask(self.op("sub", count, begin))
            value = row(self.op("add", first, begin), mask)
            stored(self.text, self.at(target, begin), "0", self.dtype, value, None)

    def pack_right(self, start: str, depth: str, first: str, last: str) -> None:
        """Copies `depth` rows of the right factor from `start` on, and its columns from `first` to `last`.

        The rows of each tile of columns follow each other in `%panel`; a tile has room for `INNER` rows.
        """
        text, distance = self.text, self.word(words.RIGHT_ROW)
        is_transposed = self.test("eq", distance, 1)
        with text.loop(first, last, self.columns) as column:
            panel = self.at("%panel", self.op("mul", self.op("sub", column.index, first), INNER))
            with self.branch(is_transposed) as otherwise:
                self._transpose(start, depth, column.index, last, panel)
                otherwise()
                left = self.op("sub", last, column.index)
                with self.branch(self.test("sge", left, self.columns)) as partly:
                    self._copy_rows(start, depth, column.index, panel, [None] * VECTORS)
                    partly()
                    masks = [self.mask(self.op("sub", left, number * self.lanes)) for number in range(VECTORS)]
                    self._copy_rows(start, depth, column.index, panel, masks)

    def _copy_rows(self, start: str, depth: str, column: str, panel: str, masks: Sequence[Vector | None]) -> None:
        with self._each_row("%right", start, depth, self.word(words.RIGHT_ROW)) as (k, row):
            target = self.at(panel, self.op("mul", k, self.columns))
            for number, mask in enumerate(masks):
                value = row(self.op("add", column, number * self.lanes), mask)
                stored(self.text, self.at(target, number * self.lanes), "0", self.dtype, value, None)

    def _transpose(self, start: str, depth: str, column: str, last: str, panel: str) -> None:
        """Columns that are rows in memory; those beyond the last one are that one again."""
        distance, final = self.word(words.RIGHT_COLUMN), self.op("sub", last, 1)
        for number in range(VECTORS):
            columns = [self.op("add", column, number * self.lanes + lane) for lane in range(self.lanes)]
            places = [self.op("mul", self.minimum(one, final), distance) for one in columns]
            sources = [self.factor_at(self.factor_at("%right", place), start) for place in places]
            with self._each_vector(depth) as (k, vector):
                self._put_transposed([vector(source) for source in sources], k, panel, number)

    def _put_transposed(self, vectors: list[Vector], k: str, panel: str, number: int) -> None:
        """Writes whole vectors: a panel has room for rows up to a multiple of the lanes."""
        target = self.at(panel, self.op("add", self.op("mul", k, self.columns), number * self.lanes))
        for row, vector in enumerate(self._transposed(vectors)):
            stored(self.text, self.at(target, row * self.columns), "0", self.dtype, vector, None)

    def _transposed(self, vectors: list[Vector]) -> list[Vector]:
        """The columns of a square matrix, from its rows: each step exchanges one bit of row and column."""
        lanes = range(self.lanes)
        for step in (1 << bit for bit in range(int(math.log2(self.lanes)))):
            exchanged = list(vectors)
            for row in (row for row in lanes if not row & step):
                low = [lane if not lane & step else self.lanes + (lane ^ step) for lane in lanes]
                high = [lane | step if not lane & step else self.lanes + lane for lane in lanes]
                pair = vectors[row], vectors[row | step]
                exchanged[row], exchanged[row | step] = self._shuffled(*pair, low), self._shuffled(*pair, high)
            vectors = exchanged
        return vectors

    def _shuffled(self, first: Vector, second: Vector, order: Sequence[int]) -> Vector:
        kind, places = first.type, ", ".join(f"i32 {place}" for place in order)
        return first.made(f"shufflevector {kind} {first.name}, {kind} {second.name}, <{len(order)} x i32> <{places}>")


_FORTRAN = (
    "ptr %right_form, ptr %left_form, ptr %columns_at, ptr %rows_at, ptr %inner_at, ptr %alpha, ptr %right, "
    "ptr %right_length, ptr %left, ptr %left_length, ptr %beta, ptr %result, ptr %result_length"
)
_ONE = _FORTRAN.replace("%right,", "%right_one,").replace("%left,", "%left_one,").replace("%result,", "%result_one,")
_WORDS = {
    ROW_BLOCKS: "%blocks",
    COLUMN_BLOCKS: 1,
    BLOCK_FUNCTION: "%block",
    FINISH_FUNCTION: 0,
    words.LEFT: "%left_address",
    words.RIGHT: "%right_address",
    words.RESULT: "%result_address",
    words.ROWS: "%rows",
    words.COLUMNS: "%columns",
    words.INNER: "%inner",
    words.RESULT_ROW: "%row_length",
    words.IS_ADDED: "%is_added",
    words.AXIS: "%axis",
    words.COUNT: "%count",
}
_PUTS = "\n".join(f"  call void @put(ptr %args, i64 {position}, i64 {value})" for position, value in _WORDS.items())
# BLAS stores matrices by columns: the first factor is the transpose of the right one of matrices stored by rows.
_GEMM = f"""
define internal void @put(ptr %args, i64 %position, i64 %value) alwaysinline {{{{
  %at = getelementptr i64, ptr %args, i64 %position
  store i64 %value, ptr %at
  ret void
}}}}
define internal void @strides(ptr %args, i64 %row_position, ptr %form_at, ptr %length_at) {{{{
  %column_position = add i64 %row_position, 1
  %form = load i8, ptr %form_at
  %length = load i64, ptr %length_at
  %is_transposed = icmp eq i8 %form, {_TRANSPOSED}
  %row = select i1 %is_transposed, i64 1, i64 %length
  %column = select i1 %is_transposed, i64 %length, i64 1
  call void @put(ptr %args, i64 %row_position, i64 %row)
  call void @put(ptr %args, i64 %column_position, i64 %column)
  ret void
}}}}
define internal void @start({_FORTRAN}, i64 %count, i64 %is_batch) {{{{
  %args = alloca i64, i64 {words.WORDS}, align 64
  %columns = load i64, ptr %columns_at
  %rows = load i64, ptr %rows_at
  %inner = load i64, ptr %inner_at
  %beta_bits = load {{bits}}, ptr %beta
  %threads32 = {{thread_count}}
  %threads = sext i32 %threads32 to i64
  %left_address = ptrtoint ptr %left to i64
  %right_address = ptrtoint ptr %right to i64
  %result_address = ptrtoint ptr %result to i64
  %block = ptrtoint ptr @block to i64
  call void @strides(ptr %args, i64 {words.LEFT_ROW}, ptr %left_form, ptr %left_length)
  call void @strides(ptr %args, i64 {words.RIGHT_ROW}, ptr %right_form, ptr %right_length)
  %row_length = load i64, ptr %result_length
  %row_units = udiv i64 %rows, {{rows}}
  %column_units = udiv i64 %columns, {{columns}}
  %is_high = icmp sge i64 %rows, %columns
  %few_rows = icmp slt i64 %row_units, %threads
  %few_columns = icmp slt i64 %column_units, %threads
  %has_more_columns = icmp sgt i64 %column_units, %row_units
  %has_more_rows = icmp sgt i64 %row_units, %column_units
  %leaves_rows = and i1 %few_rows, %has_more_columns
  %leaves_columns = and i1 %few_columns, %has_more_rows
  %keeps_rows = xor i1 %leaves_rows, true
  %by_rows = select i1 %is_high, i1 %keeps_rows, i1 %leaves_columns
  %axis_of_one = select i1 %by_rows, i64 {words.BY_ROWS}, i64 {words.BY_COLUMNS}
  %batch = icmp ne i64 %is_batch, 0
  %axis = select i1 %batch, i64 {words.BY_MATRICES}, i64 %axis_of_one
  %row_work = mul i64 %rows, %columns
  %work_of_one = mul i64 %row_work, %inner
  %work = mul i64 %work_of_one, %count
  %is_small = icmp slt i64 %work, {_SMALL}
  %blocks = select i1 %is_small, i64 1, i64 %threads
  %has_beta = icmp ne {{bits}} %beta_bits, 0
  %is_added = zext i1 %has_beta to i64
{_PUTS}
  call void {{on_threads}}(ptr %args)
  ret void
}}}}
define void @gemm({_FORTRAN}) {{{{
  call void @start({_FORTRAN}, i64 1, i64 0)
  ret void
}}}}
define void @gemm_batch({_FORTRAN}, ptr %groups, ptr %count_at) {{{{
entry:
  %count = load i64, ptr %count_at
  %threads32 = {{thread_count}}
  %threads = sext i32 %threads32 to i64
  %is_few = icmp slt i64 %count, %threads
  br i1 %is_few, label %head, label %many
head:
  %k = phi i64 [ 0, %entry ], [ %k_next, %body ]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %body, label %done
body:
  %right_slot = getelementptr ptr, ptr %right, i64 %k
  %left_slot = getelementptr ptr, ptr %left, i64 %k
  %result_slot = getelementptr ptr, ptr %result, i64 %k
  %right_one = load ptr, ptr %right_slot
  %left_one = load ptr, ptr %left_slot
  %result_one = load ptr, ptr %result_slot
  call void @start({_ONE}, i64 1, i64 0)
  %k_next = add i64 %k, 1
  br label %head
many:
  call void @start({_FORTRAN}, i64 %count, i64 1)
  br label %done
done:
  ret void
}}}}
"""
