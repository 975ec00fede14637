"""The LLVM text of a region.

`block` computes one block of rows and columns: `void block(ptr arguments, i64 number)`, which is what a thread pool
calls with each number, in any order. `finish`, for regions with column reductions, combines what the blocks left in
scratch memory, in order of blocks. Neither has state of its own.

Within a row, what needs a reduction's result comes in a later pass over the row (a stage). A value of an earlier stage
that is dear is kept in scratch memory; one that is cheap is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lit_ort.kernels.kernel_arguments import (
    COLUMN_BLOCKS,
    COLUMNS,
    LINE,
    PADDING,
    ROW_BLOCKS,
    ROWS,
    SCRATCH,
    TILE,
    partial_dtype,
)
from lit_ort.kernels.region_values import Copy, RegionValues
from lit_ort.kernels.row_stages import parts_of, scratch_arrays
from lit_ort.kernels.vector_math import cast
from lit_ort.kernels.vector_memory import loaded, scattered, stored
from lit_ort.kernels.vector_text import Text, Vector
from lit_ort.regions.element_types import computed_in, size_of
from lit_ort.regions.interpret_region import identity_of
from lit_ort.regions.region import (
    CONTIGUOUS,
    LONG_SUM,
    ColumnReduction,
    Load,
    Reduce,
    Region,
    Store,
    arguments_of,
)


def write_region(text: Text, region: Region, vector_bytes: int) -> None:
    """Append the functions `block.KEY`, and `finish.KEY` where needed, to a text."""
    _RegionText(text, region, vector_bytes).write()


# What a loop over columns does: from the vectors of columns, and what is carried, to what is carried on.
_Body = Callable[[list[Copy], list[Vector]], list[Vector]]
# A long sum of columns adds the rows of so many in float32, and these in float64.
_ROWS_OF_PART = 64


class _RegionText(RegionValues):
    def write(self) -> None:
        key = self.region.key
        self.text.function(f"block.{key}", f"void @block.{key}(ptr noalias %args, i64 %block)", self._block)
        if self.region.columns:
            self.text.function(f"finish.{key}", f"void @finish.{key}(ptr noalias %args)", self._finish)

    def _block(self) -> None:
        text = self.text
        text.report = self._report
        column_blocks = self._word(COLUMN_BLOCKS)
        row_block = self._op("udiv", "%block", column_blocks)
        column_block = self._op("urem", "%block", column_blocks)
        low, high = self._part(self._word(ROWS), row_block, self._word(ROW_BLOCKS))
        tile = self._word(TILE)
        self.low = self._op("mul", column_block, tile)
        end, width = self._op("add", self.low, tile), self._word(self.layout.size(self.layout.rank - 1))
        self.high = text.call("llvm.smin.i64", "i64", ("i64", end), ("i64", width))
        arrays = self._arrays(row_block)
        columns = self.columns = list(zip(self.region.columns, arrays, strict=False))
        parts, rest = parts_of(self.region), arrays[len(columns) :]
        self.kept = dict(zip(self.stages.kept, rest[len(parts) :], strict=True))
        for column, array in columns:
            self._initialize(column, array)
        for at, store in enumerate(self.region.stores):
            if store.target is not None:
                self._fill(store, self.layout.places[len(self.load_of) + at])
        if parts:
            self._rows_in_parts(low, high, dict(zip(parts, zip(parts.values(), rest, strict=False), strict=True)))
        else:
            self._rows(low, high)
        text.line("ret void")

    def _rows(self, low: str, high: str) -> None:
        first = [Vector(self.text, index, "int64", 0) for index in self._split_row(low)]
        with self.text.loop(low, high, 1, first) as rows:
            self.row = [vector.name for vector in rows.current]
            self._one_row()
            rows.carry([Vector(self.text, index, "int64", 0) for index in self._next_row(rows.index)])

    def _rows_in_parts(self, low: str, high: str, parts: dict[int, tuple[ColumnReduction, str]]) -> None:
        """Rows, and after a few of them their sums of columns, which are then added to totals."""
        totals = self.columns
        self.columns = [parts.get(at, total) for at, total in enumerate(totals)]
        with self.text.loop(low, high, _ROWS_OF_PART) as few:
            for column, array in parts.values():
                self._initialize(column, array)
            end = self._op("add", few.index, _ROWS_OF_PART)
            self._rows(few.index, self.text.call("llvm.smin.i64", "i64", ("i64", end), ("i64", high)))
            for at, (column, array) in parts.items():
                self._add_part(column, array, totals[at][1])

    def _add_part(self, column: ColumnReduction, part: str, total: str) -> None:
        text, dtype = self.text, partial_dtype(self.region, column)

        def body(copies: list[Copy], accumulators: list[Vector]) -> list[Vector]:
            for copy in copies:
                at = self._op("add", self.flat, copy.column)
                added = cast(loaded(text, part, at, dtype, self.lanes, self.mask), "float64")
                before = loaded(text, total, at, "float64", self.lanes, self.mask)
                stored(text, total, at, "float64", before + added, self.mask)
            return accumulators

        with text.scope():
            self._nest(0, [], body)

    def _part(self, size: str, number: str, count: str) -> tuple[str, str]:
        """The start and the end of a part of count equal ones."""
        following = self._op("add", number, 1)
        start, end = (self._op("udiv", self._op("mul", n, size), count) for n in (number, following))
        return start, end

    def _arrays(self, row_block: str) -> list[str]:
        """The addresses of a row block's arrays in scratch memory."""
        dtypes = scratch_arrays(self.region)
        if not dtypes:
            return []
        columns, offset, offsets = self._word(COLUMNS), "0", []
        for dtype in dtypes:
            offsets.append(offset)
            size = self._op("add", self._op("mul", columns, size_of(dtype)), PADDING + LINE - 1)
            offset = self._op("add", self._op("and", size, -LINE), offset)
        start = self._op("mul", row_block, offset)
        scratch = self._word(SCRATCH, "ptr")
        return [self.text.value(f"getelementptr i8, ptr {scratch}, i64 {self._op('add', start, at)}") for at in offsets]

    def _initialize(self, column: ColumnReduction, array: str) -> None:
        dtype = partial_dtype(self.region, column)
        identity = self.text.literal(identity_of(column.kind, dtype), dtype)
        if not self.region.full[column.value]:
            stored(self.text, array, "0", dtype, identity, None)
            return

        def body(copies: list[Copy], accumulators: list[Vector]) -> list[Vector]:
            for copy in copies:
                place = self._op("add", self.flat, copy.column)
                stored(self.text, array, place, dtype, identity.splat(self.lanes), self.mask)
            return accumulators

        with self.text.scope():
            self._nest(0, [], body)

    def _fill(self, store: Store, place: int) -> None:
        """Sets the columns of all that an index can select to 0, or to those of an input."""
        text, dtype, index = self.text, store.access.dtype, place + 1 + self.layout.rank
        pointer = self._word(self.layout.output(store.access.tensor), "ptr")
        source = None if store.start is None else self._word(self.layout.input(store.start), "ptr")
        zero = text.literal(0, computed_in(dtype), self.lanes)

        def body(copies: list[Copy], accumulators: list[Vector]) -> list[Vector]:
            for copy in copies:
                at = self._op("add", start, copy.column)
                for axis, number in enumerate(self.inner[: self.region.inner - 1]):
                    stride = self._word(place + 1 + self.region.rows + axis)
                    at = self._op("add", at, self._op("mul", number, stride))
                value = zero if source is None else loaded(text, source, at, dtype, self.lanes, self.mask)
                stored(text, pointer, at, dtype, value, self.mask)
            return accumulators

        with text.loop("0", self._word(index + 1), 1) as rows:
            start = self._op("add", self._word(place), self._op("mul", rows.index, self._word(index)))
            with text.scope():
                self._nest(0, [], body)

    # A row.

    def _one_row(self) -> None:
        self.row_values, self.row_places, self.reduced = {}, {}, {}
        for stage in range(self.stages.count):
            self.stage = stage
            self._one_stage()
        for at, store in enumerate(self.region.stores):
            if not store.access.is_full:
                self._store_row(store, len(self.load_of) + at)
        for column, array in self.columns:
            if not self.region.full[column.value]:
                dtype = partial_dtype(self.region, column)
                total = loaded(self.text, array, "0", dtype, 0, None)
                value = _combined(column.kind, total, cast(self._row_value(column.value), dtype))
                stored(self.text, array, "0", dtype, value, None)

    def _split_row(self, row: str) -> list[str]:
        """The indices of the row axes, of which some can be empty."""
        indices: list[str] = []
        for axis in reversed(range(self.region.rows)):
            size = self._word(self.layout.size(axis))
            size = self.text.call("llvm.umax.i64", "i64", ("i64", size), ("i64", "1")) if axis else size
            indices.insert(0, self._op("urem", row, size) if axis else row)
            row = self._op("udiv", row, size) if axis else row
        return indices

    def _next_row(self, row: str) -> list[str]:
        """The indices of the next row. Divisions would take as long as a short row."""
        if self.region.rows == 1:
            return [self._op("add", row, 1)]
        indices, carried = list(self.row), "1"
        for axis in reversed(range(self.region.rows)):
            following = self._op("add", indices[axis], carried)
            if axis == 0:
                return [following, *indices[1:]]
            is_end = self.text.value(f"icmp eq i64 {following}, {self._word(self.layout.size(axis))}")
            indices[axis] = self.text.value(f"select i1 {is_end}, i64 0, i64 {following}")
            carried = self.text.value(f"zext i1 {is_end} to i64")
        return indices

    def _store_row(self, store: Store, place: int) -> None:
        at = self._place(place, store.access.inner, store.indices)
        pointer = self._word(self.layout.output(store.access.tensor), "ptr")
        value = self._row_value(store.value)
        if store.target is not None:
            value = loaded(self.text, pointer, at, store.access.dtype, 0, None) + value
        stored(self.text, pointer, at, store.access.dtype, value, None)

    # A stage of a row.

    def _one_stage(self) -> None:
        region, of = self.region, self.stages.of
        reductions = [
            (number, node)
            for number, node in enumerate(region.nodes)
            if isinstance(node, Reduce) and of[node.arg] == self.stage
        ]
        stores = [
            (len(self.load_of) + at, store)
            for at, store in enumerate(region.stores)
            if store.access.is_full and max(of[number] for number in store.nodes) == self.stage
        ]
        columns = [
            (column, array)
            for column, array in self.columns
            if region.full[column.value] and of[column.value] == self.stage
        ]
        kept = [number for number in self.stages.kept if of[number] == self.stage]
        if not (reductions or stores or columns):
            return
        needed = [node.arg for _, node in reductions] + kept + [column.value for column, _ in columns]
        needed += [number for _, store in stores for number in store.nodes]
        visited: set[int] = set()
        for number in needed:
            self._prepare_row(number, visited)
        for place, store in stores:
            self._place(place, store.access.inner, store.indices)
        start = [
            self.text.literal(identity_of(node.kind, node.dtype), _accumulated_in(node), self.lanes)
            for _, node in reductions
            for _ in range(self.copies)
        ]

        def body(copies: list[Copy], accumulators: list[Vector]) -> list[Vector]:
            return self._stage_body(copies, accumulators, [node for _, node in reductions], stores, columns, kept)

        with self.text.scope():
            totals = self._nest(0, start, body)
        for at, (number, node) in enumerate(reductions):
            parts = totals[at * self.copies : (at + 1) * self.copies]
            self.reduced[number] = cast(_total(node.kind, _whole(node.kind, parts)), node.dtype)

    def _prepare_row(self, number: int, visited: set[int]) -> None:
        """Compute what is the same in the whole row before the loops over columns."""
        if number in visited:
            return
        visited.add(number)
        node = self.region.nodes[number]
        if not self.region.full[number]:
            self._row_value(number).splat(self.lanes)
            return
        if number in self.kept and self.stages.of[number] < self.stage:
            return
        for arg in arguments_of(node):
            self._prepare_row(arg, visited)
        if isinstance(node, Load):
            self._place(self.load_of[number], node.access.inner, node.indices)

    def _nest(self, axis: int, accumulators: list[Vector], body: _Body) -> list[Vector]:
        """Loops over the inner axes from one on; the last runs in vectors."""
        if axis == self.region.inner - 1:
            return self._vectors(accumulators, body)
        if axis == 0:
            self.inner = []
        size = self._word(self.layout.size(self.region.rows + axis))
        with self.text.loop("0", size, 1, accumulators) as loop:
            self.inner = [*self.inner[:axis], loop.index]
            loop.carry(self._nest(axis + 1, loop.current, body))
        return loop.current

    def _vectors(self, accumulators: list[Vector], body: _Body) -> list[Vector]:
        """The loops over the last axis: several vectors at once, then one at a time under a mask."""
        text, lanes, count = self.text, self.lanes, self.copies
        self.flat = self._flat_start()
        step = lanes * count
        span = self._op("and", self._op("sub", self.high, self.low), -step)
        whole = self._op("add", self.low, text.call("llvm.smax.i64", "i64", ("i64", span), ("i64", "0")))
        self.mask = None
        with text.loop(self.low, whole, step, accumulators) as loop:
            self.words = {}
            copies = [Copy(self._op("add", loop.index, number * lanes), number) for number in range(count)]
            loop.carry(body(copies, loop.current))
        with text.loop(whole, self.high, lanes, loop.current) as tail:
            # At most a step is left, so 32 bits are enough, which is one comparison rather than two.
            left = cast(Vector(text, self._op("sub", self.high, tail.index), "int64", 0), "int32")
            self.mask = text.indices("0", lanes, "int32").lt(left)
            self.words = {}
            text.inline = False
            tail.carry(body([Copy(tail.index, 0)], tail.current))
            text.inline = True
        self.mask = None
        return tail.current

    def _flat_start(self) -> str:
        """The number of the point at the last axis's start among the points of the inner axes."""
        flat = "0"
        for axis, index in enumerate(self.inner[: self.region.inner - 1]):
            flat = self._op(
                "mul", self._op("add", flat, index), self._word(self.layout.size(self.region.rows + axis + 1))
            )
        return flat

    def _stage_body(
        self,
        copies: list[Copy],
        accumulators: list[Vector],
        reductions: Sequence[Reduce],
        stores: Sequence[tuple[int, Store]],
        columns: Sequence[tuple[ColumnReduction, str]],
        kept: Sequence[int],
    ) -> list[Vector]:
        accumulators = list(accumulators)
        # Of a long sum, the vectors of a step are added in float32.
        steps: dict[int, list[Vector]] = {}
        for copy in copies:
            for at, node in enumerate(reductions):
                value = self._value(node.arg, copy).splat(self.lanes)
                if self.mask is not None:
                    value = self.mask.where(value, identity_of(node.kind, node.dtype))
                position = at * self.copies + copy.number
                if node.kind == LONG_SUM:
                    steps.setdefault(at, []).append(value)
                else:
                    accumulators[position] = _combined(node.kind, accumulators[position], value)
            for number in kept:
                self._value(number, copy)
            for _, store in stores:
                for number in store.nodes:
                    self._value(number, copy)
            for column, _ in columns:
                self._value(column.value, copy)
        for at, values in steps.items():
            accumulators[at * self.copies] += cast(_whole(LONG_SUM, values), "float64")
        # Stores come last, since a load after a store has to wait for it.
        for copy in copies:
            for number in kept:
                value = self._value(number, copy).splat(self.lanes)
                at = self._op("add", self.flat, copy.column)
                stored(self.text, self.kept[number], at, value.dtype, value, None)
            for place, store in stores:
                self._store(store, place, copy)
            for column, array in columns:
                value = self._value(column.value, copy).splat(self.lanes)
                at = self._op("add", self.flat, copy.column)
                total = loaded(self.text, array, at, value.dtype, self.lanes, self.mask)
                stored(self.text, array, at, value.dtype, _combined(column.kind, total, value), self.mask)
        return accumulators

    # The end of column reductions.

    def _finish(self) -> None:
        text, region = self.text, self.region
        blocks = self._word(ROW_BLOCKS)
        arrays = self._arrays("0")
        following = self._arrays("1")
        first, second = (text.value(f"ptrtoint ptr {pointer} to i64") for pointer in (arrays[0], following[0]))
        distance = self._op("sub", second, first)
        self.low, self.high = "0", self._word(self.layout.size(self.layout.rank - 1))
        self.copies, self.row = 1, []
        places = self.layout.places[len(self.load_of) + len(region.stores) :]
        for column, array, position in zip(region.columns, arrays, places, strict=False):
            with text.scope():
                self._finish_column(column, array, position, blocks, distance)
        text.line("ret void")

    def _finish_column(self, column: ColumnReduction, array: str, position: int, blocks: str, distance: str) -> None:
        text, dtype = self.text, partial_dtype(self.region, column)
        pointer = self._word(self.layout.output(column.access.tensor), "ptr")
        offset = self._word(position)
        stride = position + 1 + self.region.rows

        def total(at: str, lanes: int) -> Vector:
            identity = text.literal(identity_of(column.kind, dtype), dtype, lanes)
            with text.loop("0", blocks, 1, [identity]) as loop:
                part = text.value(f"getelementptr i8, ptr {array}, i64 {self._op('mul', loop.index, distance)}")
                value = loaded(text, part, at, dtype, lanes, self.mask if lanes else None)
                loop.carry([_combined(column.kind, loop.current[0], value)])
            return cast(loop.current[0], self.region.nodes[column.value].dtype)

        if not self.region.full[column.value]:
            stored(text, pointer, offset, column.access.dtype, total("0", 0), None)
            return

        def body(copies: list[Copy], accumulators: list[Vector]) -> list[Vector]:
            for copy in copies:
                value = total(self._op("add", self.flat, copy.column), self.lanes)
                at = offset
                for axis, index in enumerate(self.inner[: self.region.inner - 1]):
                    at = self._op("add", at, self._op("mul", index, self._word(stride + axis)))
                if column.access.inner[-1] == CONTIGUOUS:
                    at = self._op("add", at, copy.column)
                    stored(text, pointer, at, column.access.dtype, value, self.mask)
                else:
                    step = Vector(text, self._word(stride + self.region.inner - 1), "int64", 0)
                    addresses = text.indices(copy.column, self.lanes) * step + Vector(text, at, "int64", 0)
                    scattered(text, pointer, addresses, column.access.dtype, value, self.mask)
            return accumulators

        self._nest(0, [], body)


def _accumulated_in(node: Reduce) -> str:
    return "float64" if node.kind == LONG_SUM else node.dtype


def _combined(kind: str, left: Vector, right: Vector) -> Vector:
    if kind in ("sum", LONG_SUM):
        return left + right
    if kind == "prod":
        return left * right
    if kind in ("any", "all"):
        return left | right if kind == "any" else left & right
    return left.maximum(right) if kind == "max" else left.minimum(right)


def _whole(kind: str, parts: Sequence[Vector]) -> Vector:
    """The reduction of a power of two of vectors."""
    while len(parts) > 1:
        parts = [_combined(kind, *parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return parts[0]


def _total(kind: str, value: Vector) -> Vector:
    """The reduction of a vector's lanes."""
    if kind in ("any", "all"):
        return value.total("or" if kind == "any" else "and")
    if not value.is_float:
        extreme = ("u" if value.dtype in ("uint8", "bool") else "s") + kind
        return value.total({"sum": "add", "prod": "mul"}.get(kind, extreme))
    if kind in ("sum", LONG_SUM, "prod"):
        name, start = ("fmul", 1.0) if kind == "prod" else ("fadd", -0.0)
        return value.total(name, "reassoc", start)
    return value.total("fmaximum" if kind == "max" else "fminimum", "nsz")
