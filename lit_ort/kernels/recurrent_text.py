"""The LLVM text of the loops over time of recurrent layers.

`block` computes all steps for some rows of the batch, since rows don't depend on each other: `void block(ptr arguments,
i64 number)`, which is what a thread pool calls. In each step, for each vector of columns, a few rows at once: the
matmul with the state, accumulated in registers, then the cell. `pack` writes the weights in the order in which the
matmuls read them: for each vector of columns all depths, for each depth all gates, with zeros beyond the last column.

Rows beyond the last one compute the last one again. So a group of rows is loaded before any of it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lit_ort.kernels.kernel_arguments import ROW_BLOCKS
from lit_ort.kernels.kernel_text import KernelText
from lit_ort.kernels.recurrent_arguments import CELLS, PLACES
from lit_ort.kernels.vector_memory import gathered, loaded, stored
from lit_ort.kernels.vector_text import Text, Vector
from lit_ort.regions.element_types import size_of

# Rows at once; the accumulators of all their gates have to fit in the registers.
_MOST_ROWS = 8
_REGISTERS = {16: 32, 32: 16, 64: 32}


def lanes_of(dtype: str, vector_bytes: int) -> int:
    return vector_bytes // size_of(dtype)


def vectors_at_once(gates: int) -> int:
    """The vectors of columns of a group: a factor that is loaded serves two matmuls at least."""
    return 2 if gates == 1 else 1


def rows_at_once(gates: int, vector_bytes: int) -> int:
    """The rows of a group: a power of two, by which batches can often be divided."""
    matmuls = gates * vectors_at_once(gates)
    free = _REGISTERS[vector_bytes] - matmuls - 2
    rows = _MOST_ROWS
    while rows > 1 and rows * matmuls > free:
        rows //= 2
    return rows


# An array: the address of its first row, and the distance of its rows.
Array = tuple[str, str]


@dataclass(frozen=True)
class Split:
    """Rows of two arrays: the first `count` ones of one, those behind of another."""

    count: str
    first: Array
    other: Array


class Loop(KernelText):
    """What both loops have in common.

    Args:
        mode: the kind of layer.
        dtype: of all arrays.
        vector_bytes: the width of the CPU's vectors.
        gates: how many matmuls with the state a column has.
        depth: the depth of these matmuls, as a multiple of the width of the state.
    """

    def __init__(self, mode: str, dtype: str, vector_bytes: int, gates: int, depth: int) -> None:
        super().__init__(dtype, vector_bytes)
        self.mode = mode
        self.cell, self.gates, self.vectors, self._depth = CELLS[mode], gates, vectors_at_once(gates), depth
        self.rows = rows_at_once(gates, vector_bytes)
        # The first column of each vector, and which of its columns there are; then those of the current vector.
        self.all_columns: list[tuple[str, Vector]] = []
        self.columns, self.present = "", self.text.literal(True, "bool", self.lanes)
        self.step = ""  # the current one

    def write(self) -> Text:
        self.text.function("pack", "void @pack(ptr noalias %args)", self._pack)
        self.text.function("block", "void @block(ptr noalias %args, i64 %block)", self._block)
        return self.text

    # Arguments, arithmetic on their names, and memory.

    def argument(self, name: str, kind: str = "i64") -> str:
        return self.word(ROW_BLOCKS if name == "blocks" else PLACES[name], kind)

    @property
    def depth(self) -> str:
        return self.op("mul", self.argument("hidden"), self._depth)

    def array(self, name: str, step: str | None = None, block: int = 0) -> Array:
        """The address of an array's first row in a step, from one of its blocks on, and the distance of its rows."""
        pointer = self.argument(f"{name}.address", "ptr")
        if step is not None:
            pointer = self.at(pointer, self.op("mul", step, self.argument(f"{name}.step")))
        if block:
            pointer = self.at(pointer, self.op("mul", self.argument("hidden"), block))
        return pointer, self.argument(f"{name}.row")

    def either(self, test: str, first: Array, other: Array) -> Array:
        """One of two arrays."""
        kinds = ("ptr", "i64")
        pairs = zip(kinds, first, other, strict=True)
        pointer, row = (self.text.value(f"select i1 {test}, {kind} {a}, {kind} {b}") for kind, a, b in pairs)
        return pointer, row

    def before(self, test: str, step: str) -> tuple[Array | Split, Array | Split]:
        """The state and an LSTM's cell before a step: those of another step, or the first ones where `test` is True."""
        state = self.either(test, self.array("state"), self.array("output", step))
        if self.mode != "lstm":
            return state, state
        return state, self.either(test, self.array("cell"), self.array("saved", step, 4))

    def load(self, array: Array | Split, row: str, block: int = 0, mask: Vector | None = None) -> Vector:
        return loaded(self.text, *self._place(array, row, block), self.dtype, self.lanes, mask or self.present)

    def store(self, array: Array, row: str, block: int, value: Vector) -> None:
        stored(self.text, *self._place(array, row, block), self.dtype, value, self.present)

    def _place(self, array: Array | Split, row: str, block: int) -> tuple[str, str]:
        column = self.op("add", self.op("mul", self.argument("hidden"), block), self.columns) if block else self.columns
        return self.row(array, row), column

    def row(self, array: Array | Split, row: str) -> str:
        """The address of a row."""
        if isinstance(array, Split):
            is_first = self.text.value(f"icmp slt i64 {row}, {array.count}")
            return self.text.value(
                f"select i1 {is_first}, ptr {self.row(array.first, row)}, ptr {self.row(array.other, row)}"
            )
        pointer, distance = array
        return self.at(pointer, self.op("mul", row, distance))

    # Loops.

    def each_columns(self, body: Callable[[], None]) -> None:
        """A loop over the columns, some vectors at a time."""
        text, hidden = self.text, self.argument("hidden")
        with text.loop("0", hidden, self.lanes * self.vectors) as loop:
            self.all_columns = []
            for number in range(self.vectors):
                start = self.op("add", loop.index, number * self.lanes) if number else loop.index
                left = Vector(text, text.value(f"trunc i64 {self.op('sub', hidden, start)} to i32"), "int32", 0)
                self.all_columns.append((start, text.indices("0", self.lanes, "int32").lt(left)))
            body()

    def each_vector(self) -> Iterator[int]:
        """The numbers of the vectors of columns; each is the current one meanwhile."""
        for number, (columns, mask) in enumerate(self.all_columns):
            self.columns, self.present = columns, mask
            yield number

    def each_group(self, body: Callable[[list[str]], None]) -> None:
        """A loop over the groups of rows of a block, each with the numbers of its rows."""
        rows, blocks = self.argument("rows"), self.argument("blocks")
        groups = self.op("udiv", self.op("add", rows, self.rows - 1), self.rows)
        low = self.op("udiv", self.op("mul", groups, "%block"), blocks)
        high = self.op("udiv", self.op("mul", groups, self.op("add", "%block", 1)), blocks)
        last = self.op("sub", rows, 1)
        with self.text.loop(low, high, 1) as loop:
            start = self.op("mul", loop.index, self.rows)
            body([self.minimum(self.op("add", start, number), last) for number in range(self.rows)])

    def matmul(
        self, array: Array | Split, rows: Sequence[str], depth: str, start: Sequence[Sequence[Vector]]
    ) -> list[list[Vector]]:
        """The matmuls of rows with the packed weights of the columns, added to `start`, for each row and matmul."""
        text, count = self.text, self.gates * self.vectors
        pointers = [self.row(array, row) for row in rows]
        weights = self._panel()
        with text.loop("0", depth, 1, [value for row in start for value in row]) as loop:
            place = self.op("mul", loop.index, self.lanes * count)
            vectors = [
                loaded(text, weights, self.op("add", place, number * self.lanes), self.dtype, self.lanes, None)
                for number in range(count)
            ]
            factors = [loaded(text, pointer, loop.index, self.dtype, 0, None).splat(self.lanes) for pointer in pointers]
            pairs = [(factor, vector) for factor in factors for vector in vectors]
            loop.carry([factor.fma(vector, total) for (factor, vector), total in zip(pairs, loop.current, strict=True)])
        return [loop.current[at : at + count] for at in range(0, len(loop.current), count)]

    def _panel(self) -> str:
        """The address of the packed weights of the columns."""
        place = self.op("mul", self.op("mul", self.all_columns[0][0], self.depth), self.gates)
        return self.at(self.argument("packed", "ptr"), place)

    def _pack(self) -> None:
        text = self.text

        def columns() -> None:
            target = self._panel()
            with text.loop("0", self.depth, 1) as depth:
                place = self.op("mul", depth.index, self.lanes * self.gates * self.vectors)
                for vector in self.each_vector():
                    for gate in range(self.gates):
                        at = self.op("add", place, (vector * self.gates + gate) * self.lanes)
                        stored(text, target, at, self.dtype, self._weights(depth.index, gate), None)

        self.each_columns(columns)
        text.line("ret void")

    def _weights(self, depth: str, gate: int) -> Vector:
        """The weights of the current vector of columns at a depth."""
        raise NotImplementedError

    def _block(self) -> None:
        raise NotImplementedError


class Forward(Loop):
    def __init__(self, mode: str, dtype: str, vector_bytes: int) -> None:
        super().__init__(mode, dtype, vector_bytes, CELLS[mode].gates, 1)

    def _weights(self, depth: str, gate: int) -> Vector:
        hidden = self.argument("hidden")
        first = self.op("add", self.op("mul", hidden, gate), self.columns)
        rows = self.text.indices(first, self.lanes)
        places = rows * Vector(self.text, hidden, "int64", 0) + Vector(self.text, depth, "int64", 0)
        return gathered(self.text, self.argument("weight", "ptr"), places, self.dtype, self.present)

    def _block(self) -> None:
        with self.text.loop("0", self.argument("steps"), 1) as loop:
            step = self.step = loop.index
            before, cell_before = self.before(self.test("eq", step, 0), self.op("sub", step, 1))
            output = self.array("output", step)
            saved = self.array("saved", step) if self.cell.saved else output
            given = self.array("matmuls", step)

            def columns() -> None:
                gates = range(self.gates)
                biases = [
                    [(self._bias("input_bias", k), self._bias("bias", k)) for k in gates] for _ in self.each_vector()
                ]
                self.each_group(lambda rows: self._group(rows, before, cell_before, given, saved, output, biases))

            self.each_columns(columns)
        self.text.line("ret void")

    def _bias(self, name: str, gate: int) -> Vector:
        """A bias of a gate, or zeros."""
        text, bias = self.text, self.argument(name, "ptr")
        has = Vector(text, text.value(f"icmp ne ptr {bias}, null"), "bool", 0)
        return self.load((bias, "0"), "0", gate, self.present & has)

    def _group(
        self,
        rows: list[str],
        before: Array | Split,
        cell_before: Array | Split,
        inputs: Array,
        saved: Array,
        output: Array,
        biases: list[list[tuple[Vector, Vector]]],
    ) -> None:
        start = [
            [
                self._start(inputs, row, gate, *both)
                for vector in self.each_vector()
                for gate, both in enumerate(biases[vector])
            ]
            for row in rows
        ]
        matmuls = self.matmul(before, rows, self.depth, start)
        for vector in self.each_vector():
            given = [values[vector * self.gates : (vector + 1) * self.gates] for values in matmuls]
            results = self._cells(given, rows, before, cell_before, inputs, biases[vector])
            for row, values in zip(rows, results, strict=True):
                for block, value in enumerate(values[:-1]):
                    self.store(saved, row, block, value)
                self.store(output, row, 0, values[-1])

    def _cells(
        self,
        matmuls: list[list[Vector]],
        rows: list[str],
        before: Array | Split,
        cell_before: Array | Split,
        inputs: Array,
        biases: list[tuple[Vector, Vector]],
    ) -> list[list[Vector]]:
        """What the rows save, and their output, for a vector of columns."""
        if self.mode == "lstm":
            cells = [self.load(cell_before, row) for row in rows]
            return [_lstm(given, cell) for given, cell in zip(matmuls, cells, strict=True)]
        if self.mode == "gru":
            of_input = [self.load(inputs, row, 2) + biases[2][0] for row in rows]
            states = [self.load(before, row) for row in rows]
            return [_gru(given, x, h) for given, x, h in zip(matmuls, of_input, states, strict=True)]
        return [[given[0].tanh() if self.mode == "tanh" else _relu(given[0])] for given in matmuls]

    def _start(self, inputs: Array, row: str, gate: int, input_bias: Vector, bias: Vector) -> Vector:
        """What a gate's matmul with the state is added to."""
        if self.mode != "gru" or gate < 2:
            return self.load(inputs, row, gate) + (input_bias + bias)
        return bias


def _lstm(gates: Sequence[Vector], cell: Vector) -> list[Vector]:
    """What a step of an LSTM saves, and its output."""
    i, f, g, o = gates
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * cell + i * g
    return [i, f, g, o, cell, o * cell.tanh()]


def _gru(matmuls: Sequence[Vector], x: Vector, state: Vector) -> list[Vector]:
    """What a step of a GRU saves, and its output."""
    reset, update, part = matmuls
    reset, update = reset.sigmoid(), update.sigmoid()
    new = reset.fma(part, x).tanh()
    return [reset, update, part, new, update.fma(state - new, new)]


def _relu(x: Vector) -> Vector:
    return x.lt(0.0).where(0.0, x)


class Backward(Loop):
    def __init__(self, mode: str, dtype: str, vector_bytes: int) -> None:
        super().__init__(mode, dtype, vector_bytes, 1, CELLS[mode].gates)

    def _weights(self, depth: str, gate: int) -> Vector:
        hidden = self.argument("hidden")
        row = depth
        if self.cell.turned:
            # The gradients of the matmuls begin with another gate than the weights.
            row = self.op("add", depth, self.op("mul", hidden, self.cell.turned))
            row = self.op("urem", row, self.op("mul", hidden, self.cell.gates))
        place = self.op("add", self.op("mul", row, hidden), self.columns)
        return loaded(self.text, self.argument("weight", "ptr"), place, self.dtype, self.lanes, self.present)

    def _block(self) -> None:
        steps = self.argument("steps")
        with self.text.loop("0", self.op("add", steps, 1), 1) as loop:
            step = loop.index
            is_first = self.test("eq", step, 0)
            depth = self.text.value(f"select i1 {is_first}, i64 0, i64 {self.depth}")
            later = self.array("gradients", self.op("sub", step, 1))
            self.each_columns(lambda: self.each_group(lambda rows: self._group(rows, step, depth, later)))
        self.text.line("ret void")

    def _group(self, rows: list[str], step: str, depth: str, later: Array | Split) -> None:
        carried = self.carried(rows, depth, later)
        with self.branch(self.test("eq", step, self.argument("steps"))) as otherwise:
            self.end(rows, carried)
            otherwise()
            self.steps(rows, step, carried)

    def carried(self, rows: list[str], depth: str, later: Array | Split) -> list[list[Vector]]:
        """The gradients of the states behind a step, from those of the gates of the step that ran before."""
        of_state = self.array("of_state")
        start = [[self.load(of_state, row) for _ in self.each_vector()] for row in rows]
        return self.matmul(later, rows, depth, start)

    def end(self, rows: list[str], carried: list[list[Vector]]) -> None:
        """Keeps the gradients of the states before the first step."""
        of_state = self.array("of_state")
        for vector in self.each_vector():
            for row, values in zip(rows, carried, strict=True):
                self.store(of_state, row, 0, values[vector])

    def steps(self, rows: list[str], step: str, carried: list[list[Vector]]) -> None:
        for vector in self.each_vector():
            self._step(rows, step, [values[vector] for values in carried])

    def _step(self, rows: list[str], step: str, carried: list[Vector]) -> None:
        """The gradients of a step's gates, from that of the state after it without the step's own."""
        is_last = self.test("eq", self.op("add", step, 1), self.argument("steps"))
        before, cell_before = self.before(is_last, self.op("add", step, 1))
        grad, gradients = self.array("grad", step), self.array("gradients", step)
        of_cell, of_state = self.array("of_cell"), self.array("of_state")
        kept = self.array("saved", step) if self.cell.saved else self.array("output", step)
        values = [[self.load(kept, row, block) for block in range(max(1, self.cell.saved))] for row in rows]
        totals = [given + self.load(grad, row) for row, given in zip(rows, carried, strict=True)]
        if self.mode == "lstm":
            cells = [(self.load(cell_before, row), self.load(of_cell, row)) for row in rows]
            results = [_lstm_gradients(v, *c, t) for v, c, t in zip(values, cells, totals, strict=True)]
        elif self.mode == "gru":
            states = [self.load(before, row) for row in rows]
            results = [_gru_gradients(v, s, t) for v, s, t in zip(values, states, totals, strict=True)]
        else:
            results = [_plain_gradients(self.mode, v[0], t) for v, t in zip(values, totals, strict=True)]
        for row, result in zip(rows, results, strict=True):
            for block, value in enumerate(result[: self.cell.gradients]):
                self.store(gradients, row, block, value)
            for array, value in zip((of_state, of_cell), result[self.cell.gradients :], strict=False):
                self.store(array, row, 0, value)


def _of_sigmoid(grad: Vector, y: Vector) -> Vector:
    return grad * ((1.0 - y) * y)


def _of_tanh(grad: Vector, y: Vector) -> Vector:
    return grad * (1.0 - y * y)


def _lstm_gradients(kept: Sequence[Vector], before: Vector, of_cell: Vector, of_state: Vector) -> list[Vector]:
    """The gradients of the gates, zero for the state before, and that of the cell before."""
    i, f, g, o, cell = kept
    active = cell.tanh()
    of_cell = of_cell + _of_tanh(of_state * o, active)
    gates = [_of_sigmoid(of_cell * g, i), _of_sigmoid(of_cell * before, f), _of_tanh(of_cell * i, g)]
    return [*gates, _of_sigmoid(of_state * active, o), of_state.like(0.0), of_cell * f]


def _gru_gradients(kept: Sequence[Vector], before: Vector, of_state: Vector) -> list[Vector]:
    """The gradients of a step, and what the update gate passes to the state before."""
    reset, update, part, new = kept
    of_new = _of_tanh(of_state * (1.0 - update), new)
    of_reset, of_update = _of_sigmoid(of_new * part, reset), _of_sigmoid(of_state * (before - new), update)
    return [of_new * reset, of_reset, of_update, of_new, of_state * update]


def _plain_gradients(mode: str, output: Vector, of_state: Vector) -> list[Vector]:
    """The gradient of a step, and zero for the state before."""
    before = _of_tanh(of_state, output) if mode == "tanh" else output.le(0.0).where(0.0, of_state)
    return [before, of_state.like(0.0)]
