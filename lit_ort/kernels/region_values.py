"""The LLVM text of a region's values: of a row, and of a vector of columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lit_ort.kernels.kernel_arguments import (
    BAD_INDEX,
    BAD_VALUE,
    COLUMN_ALIGNMENT,
    DIVISION_BY_ZERO,
    Layout,
    cost_of,
)
from lit_ort.kernels.row_stages import stages_of
from lit_ort.kernels.vector_math import cast, random_words, uniform_of
from lit_ort.kernels.vector_memory import gathered, loaded, scattered, stored
from lit_ort.kernels.vector_text import Text, Vector
from lit_ort.regions.element_types import is_float
from lit_ort.regions.pointwise_table import OPERATORS
from lit_ort.regions.region import (
    BROADCAST,
    CONTIGUOUS,
    Apply,
    Index,
    Literal,
    Load,
    Region,
    Scalar,
    Store,
)

_FLAGS = {"division": DIVISION_BY_ZERO, "index": BAD_INDEX, "value": BAD_VALUE}


@dataclass
class Copy:
    """One vector of the columns that a loop's body computes."""

    column: str
    number: int
    memo: dict[int, Vector] = field(default_factory=dict)


class RegionValues:
    """Writes the values of a region's nodes, and where their elements are.

    Args:
        text: receives the code.
        region: what is computed.
        vector_bytes: the width of vectors.
    """

    def __init__(self, text: Text, region: Region, vector_bytes: int) -> None:
        self.text, self.region = text, region
        self.layout = Layout(region)
        self.stages = stages_of(region)
        wide = any(node.dtype == "float64" for node in region.nodes)
        self.lanes = vector_bytes // (8 if wide else 4)
        self.copies = self._unrolling()
        self.load_of = {number: at for at, number in enumerate(self._loads())}
        # What is known in the row that is being written, and in the loops of its inner axes.
        self.row: list[str] = []
        self.inner: list[str] = []
        self.row_values: dict[int, Vector] = {}
        self.reduced: dict[int, Vector] = {}
        self.row_places: dict[int, str] = {}
        self.flat = "0"
        self.mask: Vector | None = None
        # Arrays of kept values.
        self.kept: dict[int, str] = {}
        self.stage = 0
        self.words: dict[tuple[int, int], tuple[Vector, ...]] = {}

    def _loads(self) -> list[int]:
        return [number for number, node in enumerate(self.region.nodes) if isinstance(node, Load)]

    def _unrolling(self) -> int:
        if any(isinstance(node, Apply) and node.operator == "random" for node in self.region.nodes):
            return max(1, COLUMN_ALIGNMENT // self.lanes)
        cost = cost_of(self.region)
        return 4 if cost <= 10 else 2 if cost <= 40 else 1

    # Words of the arguments, and integer arithmetic on names.

    def _word(self, position: int, kind: str = "i64") -> str:
        pointer = self.text.value(f"getelementptr i64, ptr %args, i64 {position}")
        return self.text.value(f"load {kind}, ptr {pointer}, align 8")

    def _op(self, operation: str, left: str, right: str | int) -> str:
        if operation == "add" and right in ("0", 0):
            return left
        if operation == "add" and left == "0":
            return str(right)
        return self.text.value(f"{operation} i64 {left}, {right}")

    # Values.

    def _row_value(self, number: int) -> Vector:
        """The value of a row-level node."""
        if number in self.reduced:
            return self.reduced[number]
        if number not in self.row_values:
            self.row_values[number] = self._new_row_value(number)
        return self.row_values[number]

    def _new_row_value(self, number: int) -> Vector:
        node, text = self.region.nodes[number], self.text
        if isinstance(node, Literal):
            return text.literal(node.value, node.dtype)
        if isinstance(node, Scalar):
            dtype = "float64" if is_float(node.dtype) else "int64"
            word = self._word(self.layout.scalar(node.position), "double" if dtype == "float64" else "i64")
            return cast(Vector(text, word, dtype, 0), node.dtype)
        if isinstance(node, Index):
            return Vector(text, self.row[node.axis], "int64", 0)
        if isinstance(node, Load):
            at = self._place(self.load_of[number], node.access.inner, node.indices)
            pointer = self._word(self.layout.input(node.access.tensor), "ptr")
            mask = None if node.mask is None else self._row_value(node.mask)
            return loaded(text, pointer, at, node.access.dtype, 0, mask)
        assert isinstance(node, Apply), node
        return self._applied(node, [self._row_value(arg) for arg in node.args])

    def _applied(self, node: Apply, arguments: list[Vector]) -> Vector:
        if node.operator == "cast":
            return cast(arguments[0], node.dtype)
        return OPERATORS[node.operator].formula(*arguments)

    def _value(self, number: int, copy: Copy) -> Vector:
        """The value of a node for a vector of columns; a scalar where it is the same for all."""
        if not self.region.full[number]:
            return self._row_value(number)
        if number not in copy.memo:
            copy.memo[number] = self._new_value(number, copy)
        return copy.memo[number]

    def _new_value(self, number: int, copy: Copy) -> Vector:
        node, text = self.region.nodes[number], self.text
        if number in self.kept and self.stages.of[number] < self.stage:
            at = self._op("add", self.flat, copy.column)
            return loaded(text, self.kept[number], at, node.dtype, self.lanes, None)
        if isinstance(node, Index):
            if node.axis == self.layout.rank - 1:
                return text.indices(copy.column, self.lanes)
            return Vector(text, self.inner[node.axis - self.region.rows], "int64", 0)
        if isinstance(node, Load):
            return self._load(number, node, copy)
        assert isinstance(node, Apply), node
        arguments = [self._value(arg, copy) for arg in node.args]
        if node.operator == "random" and self._shares_words(node, arguments):
            return self._random(number, arguments, copy)
        return self._applied(node, arguments)

    def _shares_words(self, node: Apply, arguments: Sequence[Vector]) -> bool:
        """Whether the vectors of a loop's body are neighbours that share random words."""
        column = self.region.nodes[node.args[3]]
        is_last = isinstance(column, Index) and column.axis == self.layout.rank - 1
        aligned = self.mask is None and self.lanes * self.copies == COLUMN_ALIGNMENT
        return is_last and aligned and not any(argument.lanes for argument in arguments[:3])

    def _random(self, number: int, arguments: Sequence[Vector], copy: Copy) -> Vector:
        start = copy.number * self.lanes
        key = (number, start % 16)
        if key not in self.words:
            base = self._op("lshr", self._op("sub", copy.column, start), 2)
            counter = self.text.indices(self._op("add", base, start % 16), self.lanes)
            self.words[key] = random_words(arguments[0], arguments[1], arguments[2], cast(counter, "int32"))
        return uniform_of(self.words[key][start // 16])

    # Places.

    def _place(self, number: int, inner: str, indices: Sequence[int]) -> str:
        """The element of a place at the row's start, with the indices that are the same in the row."""
        if number not in self.row_places:
            position = self.layout.places[number]
            at = self._word(position)
            for axis, index in enumerate(self.row):
                at = self._op("add", at, self._op("mul", index, self._word(position + 1 + axis)))
            for which, index in enumerate(indices):
                if not self.region.full[index]:
                    at = self._op("add", at, self._scaled(number, which, self._row_value(index)).name)
            self.row_places[number] = at
        return self.row_places[number]

    def _inner_place(self, number: int, inner: str, indices: Sequence[int]) -> str:
        """The element of a place at the start of the last axis."""
        at = self._place(number, inner, indices)
        position = self.layout.places[number] + 1 + self.region.rows
        for axis, (kind, index) in enumerate(zip(inner[:-1], self.inner, strict=False)):
            if kind != BROADCAST:
                at = self._op("add", at, self._op("mul", index, self._word(position + axis)))
        return at

    def _scaled(self, number: int, which: int, index: Vector) -> Vector:
        """index · stride of an index of a place; one that is outside of its size is reported, and 0."""
        position = self.layout.places[number] + 1 + self.layout.rank + 2 * which
        stride, size = (Vector(self.text, self._word(position + at), "int64", 0) for at in (0, 1))
        low, high = index, size.splat(index.lanes)
        inside = index.made(f"icmp ult {low.type} {low.name}, {high.name}", "bool")
        self._report("index", ~inside)
        return inside.where(index, 0) * stride

    def _addresses(self, number: int, inner: str, indices: Sequence[int], copy: Copy) -> Vector | None:
        """The element of each lane; None for neighbours, and for one element."""
        varying = [which for which, index in enumerate(indices) if self.region.full[index]]
        kind = inner[-1]
        values = [self._value(indices[which], copy) for which in varying]
        if not varying and kind in (BROADCAST, CONTIGUOUS):
            return None
        at = Vector(self.text, self._inner_place(number, inner, indices), "int64", 0)
        if kind != BROADCAST:
            column = self.text.indices(copy.column, self.lanes)
            if kind != CONTIGUOUS:
                column = column * Vector(
                    self.text, self._word(self.layout.places[number] + self.layout.rank), "int64", 0
                )
            at = column + at
        for which, value in zip(varying, values, strict=True):
            at = at + self._scaled(number, which, value)
        return at.splat(self.lanes)

    def _load(self, number: int, node: Load, copy: Copy) -> Vector:
        text, access = self.text, node.access
        pointer = self._word(self.layout.input(access.tensor), "ptr")
        mask = None if node.mask is None else self._value(node.mask, copy)
        with self._masked(mask):
            place = self.load_of[number]
            addresses = self._addresses(place, access.inner, node.indices, copy)
            if addresses is not None:
                return gathered(text, pointer, addresses, access.dtype, self.mask)
            at = self._inner_place(place, access.inner, node.indices)
            if access.inner[-1] == BROADCAST:
                if mask is None or not mask.lanes:
                    return loaded(text, pointer, at, access.dtype, 0, mask)
                address = Vector(text, at, "int64", 0).splat(self.lanes)
                return gathered(text, pointer, address, access.dtype, self.mask)
            return loaded(text, pointer, self._op("add", at, copy.column), access.dtype, self.lanes, self.mask)

    @contextmanager
    def _masked(self, mask: Vector | None) -> Iterator[None]:
        """Within this context, lanes are active where a mask is True, too."""
        outer = self.mask
        if mask is not None:
            mask = mask.splat(self.lanes)
            self.mask = mask if outer is None else outer & mask
        try:
            yield
        finally:
            self.mask = outer

    def _store(self, store: Store, place: int, copy: Copy) -> None:
        text, access = self.text, store.access
        pointer = self._word(self.layout.output(access.tensor), "ptr")
        value = self._value(store.value, copy).splat(self.lanes)
        addresses = self._addresses(place, access.inner, store.indices, copy)
        if addresses is None:
            at = self._op("add", self._inner_place(place, access.inner, store.indices), copy.column)
            if store.target is not None:
                value = loaded(text, pointer, at, access.dtype, self.lanes, self.mask) + value
            stored(text, pointer, at, access.dtype, value, self.mask)
        else:
            scattered(text, pointer, addresses, access.dtype, value, self.mask)

    def _report(self, what: str, condition: Vector) -> None:
        """Set a flag of the arguments where a condition is met by an active lane."""
        text = self.text
        if self.mask is not None and condition.lanes:
            condition = condition & self.mask
        number = text.name()[2:]
        text.line(f"br i1 {condition.total('or').name}, label %flag{number}, label %sound{number}")
        text.label(f"flag{number}")
        pointer = text.effect(f"getelementptr i64, ptr %args, i64 {_FLAGS[what]}")
        text.line(f"store i64 1, ptr {pointer}, align 8")
        text.line(f"br label %sound{number}")
        text.label(f"sound{number}")
