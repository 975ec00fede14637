"""Forms regions of the values of a graph: greedily, each value joins the region of what it reads where it can.

A region has N points, of which C make a row once there is a reduction. Every access is a view of N points or of the N /
C rows, so the index arithmetic of all accesses is that of one linear index, cut where any view cuts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from lit_ort.regions.element_types import computed_in
from lit_ort.regions.graph_values import GraphValues, LibraryCall, read_graph
from lit_ort.regions.iteration_order import with_long_last_axis
from lit_ort.regions.region import Apply, Region
from lit_ort.regions.region_builder import RegionBuilder
from lit_ort.regions.region_run import Place, RegionRun
from lit_ort.regions.step_order import StepOrder
from lit_ort.regions.strided_views import StridedView, cuts_of, is_chain, strides_over
from lit_ort.regions.symbolic_size import Number, Size, product, quotient
from lit_ort.regions.value_expressions import Compute, Constant, Expression, Read, Take, Value, reads_of

# Regions of more are compiled slowly, and their vectors don't fit into registers.
_MOST_VALUES = 48
_MOST_AXES = 6
# Reading as many elements again costs less than computing two things one after another.
_SMALL = 256
FULL, ROW, REDUCED, COLUMN, SCATTER = "full", "row", "reduced", "column", "scatter"


@dataclass(frozen=True)
class RegionCall:
    """A region with its arguments: what it reads and writes."""

    region: Region
    run: RegionRun[Number]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Schedule:
    """What runs in which order.

    Args:
        values: inputs and outputs of the graph.
        steps: calls of regions and of the library.
    """

    values: GraphValues
    steps: tuple[RegionCall | LibraryCall, ...]


def form_regions(graph: fx.Graph, copies_outputs: bool = False) -> Schedule:
    """The schedule of a graph.

    Args:
        graph: a graph of ATen operators.
        copies_outputs: whether each output becomes a value of its own, even if it is a view.
    """
    values = read_graph(graph, copies_outputs)
    return _Former(values).schedule()


@dataclass(eq=False)
class _Group:
    """A region that is being formed."""

    points: Number
    row: Number | None = None
    cuts: set[Number] = field(default_factory=set)
    kinds: dict[Value, str] = field(default_factory=dict)
    reads: dict[Value, None] = field(default_factory=dict)

    def add(self, value: Value, fit: _Fit) -> None:
        """Add a value, after those of the group that it reads."""
        self.row, self.cuts = fit.row, fit.cuts
        self.kinds[value] = fit.kind
        self.reads.update((need, None) for need in value.needs() if need not in self.kinds)

    def needs(self) -> list[Value]:
        return list(self.reads)


@dataclass(frozen=True)
class _Fit:
    """How a value would be computed in a group."""

    kind: str
    row: Number | None
    cuts: set[Number]


class _Former:
    def __init__(self, values: GraphValues) -> None:
        self.values = values
        self.groups: dict[Value, _Group | LibraryCall] = {}
        self.position: dict[Value | LibraryCall, int] = {}
        # The groups that read a value, if reading it again costs something.
        self.readers: dict[Value, list[_Group]] = {}
        self.order = StepOrder[_Group | LibraryCall](lambda step: self._homes(step.needs()))
        # Groups don't change while they are merged, so that two are tried once.
        self.unions: dict[tuple[_Group, _Group], _Group | None] = {}

    def schedule(self) -> Schedule:
        steps = self._live()
        self.position = {step: at for at, step in enumerate(steps)}
        for step in steps:
            if isinstance(step, LibraryCall):
                self.groups.update(dict.fromkeys(step.results.values(), step))
                self.order.append(step)
            else:
                self._place(step)
        self._merge()
        stored = self._stored(steps)
        calls = [
            step if isinstance(step, LibraryCall) else _RegionOf(step, [v for v in step.kinds if v in stored]).call()
            for step in self._ordered(steps)
        ]
        return Schedule(self.values, tuple(calls))

    def _live(self) -> list[Value | LibraryCall]:
        """The steps that an output or a library call needs."""
        live = {read.value for read in self.values.outputs if read is not None}
        steps: list[Value | LibraryCall] = []
        for step in reversed(self.values.steps):
            if isinstance(step, LibraryCall) or step in live:
                steps.append(step)
                live.update(step.needs())
        return steps[::-1]

    def _place(self, value: Value) -> None:
        """Put a value into the latest group that it fits, of those that it reads from or that read the same."""
        candidates: list[_Group] = []
        for need in value.needs():
            group = self.groups.get(need)
            candidates += [group] if isinstance(group, _Group) else []
            candidates += self.readers.get(need, [])
        for group in sorted(dict.fromkeys(candidates), key=self._last, reverse=True):
            fit = _fit(group, value)
            if fit is None:
                continue
            later = self.order.later(group, self._homes(need for need in value.needs() if need not in group.kinds))
            if later is not None:
                self.order.move(later, group)
                break
        else:
            assert value.expression is not None
            group = _Group(product(value.expression.shape))
            fit = _fit(group, value)
            assert fit is not None, value
            self.order.append(group)
        group.add(value, fit)
        self.groups[value] = group
        for need in value.needs():
            if need.view.size >= group.points > _SMALL:
                self.readers.setdefault(need, []).append(group)

    def _last(self, group: _Group) -> int:
        return max(self.position[value] for value in group.kinds)

    def _homes(self, needs: Iterable[Value]) -> Iterator[_Group | LibraryCall]:
        """The steps that compute values; inputs have none."""
        return (self.groups[need] for need in needs if need in self.groups)

    def _merge(self) -> None:
        """Merge groups that read from one another, as long as one fits."""
        merged = True
        while merged:
            groups = dict.fromkeys(group for group in self.groups.values() if isinstance(group, _Group))
            merged = any(self._merge_into_user(group) for group in groups)

    def _merge_into_user(self, user: _Group) -> bool:
        for need in user.needs():
            group = self.groups.get(need)
            if not isinstance(group, _Group):
                continue
            if (group, user) not in self.unions:
                self.unions[group, user] = self._union(group, user)
            union = self.unions[group, user]
            later = None if union is None else self.order.later(group, self._homes(union.needs()))
            if union is not None and later is not None:
                self.order.move(later, group)
                self.order.replace(group, user, union)
                self.groups.update(dict.fromkeys(union.kinds, union))
                return True
        return False

    def _union(self, first: _Group, second: _Group) -> _Group | None:
        """One group of the values of two; None if they don't fit."""
        row = first.row if first.points >= second.points else second.row
        union = _Group(max(first.points, second.points), first.row or second.row if row is None else row)
        for value in sorted((*first.kinds, *second.kinds), key=self.position.__getitem__):
            fit = _fit(union, value)
            if fit is None:
                return None
            union.add(value, fit)
        return union

    def _stored(self, steps: Iterable[Value | LibraryCall]) -> set[Value | None]:
        """The values that something outside of their group reads."""
        stored = {output.value for output in self.values.outputs if output is not None}
        for step in steps:
            reader = self._step(step)
            stored.update(need for need in step.needs() if self.groups.get(need) is not reader)
        return stored

    def _ordered(self, steps: Iterable[Value | LibraryCall]) -> list[_Group | LibraryCall]:
        """Groups and calls after what they need, otherwise as early as their last value."""
        order: list[_Group | LibraryCall] = []
        done: set[int] = set()

        last = {id(self._step(step)): self._step(step) for step in steps}
        for first in last.values():
            # A path of steps that wait for what they need, with what is left of it.
            path = [(first, self._homes(first.needs()))] if id(first) not in done else []
            done.add(id(first))
            while path:
                step, left = path[-1]
                following = next((need for need in left if id(need) not in done), None)
                if following is None:
                    order.append(path.pop()[0])
                else:
                    done.add(id(following))
                    path.append((following, self._homes(following.needs())))
        return order

    def _step(self, step: Value | LibraryCall) -> _Group | LibraryCall:
        return step if isinstance(step, LibraryCall) else self.groups[step]


def _fit(group: _Group, value: Value) -> _Fit | None:
    """How a value fits into a group; None if it doesn't."""
    expression = value.expression
    assert expression is not None
    points, row = product(expression.shape), group.row
    if len(group.kinds) >= _MOST_VALUES or any(other.is_of_backward != value.is_of_backward for other in group.kinds):
        return None
    level, kind = (FULL, FULL) if points == group.points else (ROW, ROW)
    if value.kind == "scatter":
        # Its rows are added one after another, which nothing else is to wait for.
        if group.kinds:
            return None
        kind, row = SCATTER, expression.shape[-1]
    elif SCATTER in group.kinds.values():
        return None
    elif value.kind != "pointwise":
        count = product(expression.shape[axis] for axis in value.axes)
        # A sum of everything is one row, whatever axes of size 1 come after.
        is_trailing = value.axes[-1] == len(expression.shape) - 1 or count == points
        if level == FULL and is_trailing and row in (None, count):
            kind, row = REDUCED, count
        elif level == FULL and value.axes[0] == 0 and count < points and row in (None, quotient(points, count)):
            kind, row = COLUMN, quotient(points, count)
        elif level == ROW and count == points and row:
            kind = COLUMN
        else:
            return None
    if level == ROW and (not row or points * row != group.points):
        return None
    cuts = set(group.cuts) | {group.points} | ({row} if row else set())
    for read, level_of_read in _reads(value, level):
        scale = 1 if level_of_read == FULL else row or 1
        cuts |= {cut * scale for cut in cuts_of(read.view.merged())}
        if read.value in group.kinds and not _is_member_read(group, read, level_of_read, row):
            return None
    cuts.discard(1)
    return _Fit(kind, row, cuts) if is_chain(cuts) and len(cuts) <= _MOST_AXES else None


def _reads(value: Value, level: str) -> Iterator[tuple[Read | Take, str]]:
    """What a value of a level reads, with the level of each."""
    assert value.expression is not None
    for read in reads_of(value.expression):
        yield read, level
    if value.rows is not None:
        for read in reads_of(value.rows):
            yield read, ROW


def _is_member_read(group: _Group, read: Read | Take, level: str, row: Number | None) -> bool:
    """Whether a read of a group's own value is one of the same point or row."""
    assert read.value is not None
    kind = group.kinds[read.value]
    if isinstance(read, Take) or kind == COLUMN:
        return False
    if kind == FULL:
        return level == FULL and read.view.is_whole
    if level == ROW:
        return read.view.is_whole
    rows = quotient(group.points, row or 1)
    wanted = [(size, stride) for size, stride in ((rows, 1), (row or 1, 0)) if size > 1]
    return read.view.offset == 0 and list(read.view.merged()) == wanted


# From a group to a region.


class _RegionOf:
    """The region of a group and its arguments."""

    def __init__(self, group: _Group, stored: list[Value]) -> None:
        self.group, self.stored = group, stored
        cuts = sorted(group.cuts | {group.points} - {1}) or [1]
        self.row = group.row if group.row is not None else cuts[0]
        if self.row not in cuts:
            cuts = sorted({*cuts, self.row})
        self.cuts = [cut for cut in cuts if cut > 1] or [1]
        self.cuts = self._merged()
        self.inner = max(1, sum(cut <= self.row for cut in self.cuts))
        self.builder = RegionBuilder(len(self.cuts) - self.inner, self.inner)
        self.sizes = _sizes(self.cuts)
        self.inputs: dict[tuple[Value, Place[Number], tuple[int | None, ...]], int] = {}
        self.places: dict[int, Place[Number]] = {}
        self.nodes: dict[Value, int] = {}
        self.scalars: list[float | Number] = []

    def _merged(self) -> list[Number]:
        """The cuts that some access needs, the end of a row among them."""
        strides = [self._strides(read.view, level, self.cuts) for read, level in self._accesses()]
        kept, sizes = [self.cuts[-1]], _sizes(self.cuts)[::-1]
        for at in range(len(self.cuts) - 2, -1, -1):
            is_end = self.group.row is not None and self.cuts[at] == self.row
            inner = [list(reversed(each)) for each in strides]
            if is_end or any(each[at + 1] != each[at] * sizes[at] for each in inner):
                kept.insert(0, self.cuts[at])
        if self.group.row is None:
            self.row = kept[0]
        return kept

    def _accesses(self) -> Iterable[tuple[Read | Take | Value, str]]:
        for value, kind in self.group.kinds.items():
            assert value.expression is not None
            for read, level in _reads(value, self._level(value)):
                if read.value not in self.group.kinds:
                    yield read, level
            if value in self.stored and kind in (FULL, ROW, REDUCED):
                yield value, FULL if kind == FULL else ROW

    def _level(self, value: Value) -> str:
        assert value.expression is not None
        return FULL if product(value.expression.shape) == self.group.points else ROW

    def _strides(self, view: StridedView, level: str, cuts: list[Number]) -> list[Number]:
        dims = list(view.merged())
        if level == ROW and self.row > 1:
            dims.append((self.row, 0))
        return strides_over(dims, cuts)

    def call(self) -> RegionCall:
        for value, kind in self.group.kinds.items():
            assert value.expression is not None
            node = self._node(value.expression, self._level(value))
            if kind == REDUCED:
                # Sums of integers are int64.
                node = self.builder.cast(self.builder.reduce(value.kind, node), computed_in(value.dtype))
                node = self._rounded(node, value.dtype)
            self.nodes[value] = node
        stores, columns = [], []
        for number, value in enumerate(self.stored):
            kind = self.group.kinds[value]
            if kind == COLUMN:
                columns.append(self._column(number, value))
            elif kind == SCATTER:
                stores.append(self._scatter(number, value))
            else:
                strides = self._strides(value.view, FULL if kind == FULL else ROW, self.cuts)
                self.builder.store(number, value.dtype, self._kinds(strides), self.nodes[value])
                stores.append(Place(0, tuple(strides)))
        needed = self.builder.needed()
        loads = tuple(self.places[number] for number in needed if number in self.places)
        run = RegionRun(self.sizes, loads, tuple(stores), tuple(columns), tuple(self.scalars))
        region, run = with_long_last_axis(self.builder.region(), run)
        return RegionCall(region, run, tuple(key[0] for key in self.inputs), tuple(self.stored))

    def _strides_of_row(self) -> list[Number]:
        """The strides of values that have one for each point of a row."""
        return [*[0] * (len(self.cuts) - self.inner), *strides_over([(self.row, 1)], self.cuts[: self.inner])]

    def _scatter(self, number: int, value: Value) -> Place[Number]:
        assert value.rows is not None
        row, strides, start = self._node(value.rows, ROW), self._strides_of_row(), None
        if value.start is not None:
            start = self.inputs.setdefault((value.start, Place(0, ()), ()), len(self.inputs))
        self.builder.scatter(number, value.dtype, self._kinds(strides), self.nodes[value], row, start)
        return Place(0, tuple(strides), ((self.row, product(value.shape[:-1])),))

    def _column(self, number: int, value: Value) -> Place[Number]:
        is_full = self._level(value) == FULL and self.row > 1
        strides: list[Number] = self._strides_of_row() if is_full else [0] * len(self.cuts)
        self.builder.column(number, value.dtype, self._kinds(strides), value.kind, self.nodes[value])
        return Place(0, tuple(strides))

    def _kinds(self, strides: list[Number]) -> str:
        inner = strides[len(self.cuts) - self.inner :]
        last = "0" if inner[-1] == 0 else "1" if inner[-1] == 1 else "s"
        return "".join("0" if stride == 0 else "s" for stride in inner[:-1]) + last

    def _node(self, expression: Expression, level: str) -> int:
        builder = self.builder
        if isinstance(expression, Constant):
            dtype = computed_in(expression.dtype)
            if expression.is_argument:
                return self._scalar(expression.number, dtype)
            assert not isinstance(expression.number, Size)
            return builder.literal(expression.number, dtype)
        if isinstance(expression, Compute):
            args = [self._node(arg, level) for arg in expression.args]
            dtype = computed_in(expression.dtype)
            if expression.operator == "cast":
                return self._rounded(builder.cast(args[0], dtype), expression.dtype)
            return self._rounded(builder.add(Apply(expression.operator, tuple(args), dtype)), expression.dtype)
        mask = None
        if isinstance(expression, Read) and expression.mask is not None:
            mask = self._node(expression.mask, level)
        if isinstance(expression, Read) and expression.value in self.nodes:
            node = self.nodes[expression.value]
            if mask is None:
                return node
            return builder.apply("where", mask, node, builder.literal(0, computed_in(expression.dtype)))
        strides = self._strides(expression.view, level, self.cuts)
        if expression.value is None:
            return self._number(strides, expression.view.offset)
        indices: list[int] = []
        index_places: tuple[tuple[Number, Number], ...] = ()
        if isinstance(expression, Take):
            indices, index_places = [self._node(expression.index, level)], ((expression.stride, expression.size),)
        # What is read at two places is two inputs of the region.
        place = Place(expression.view.offset, tuple(strides), index_places)
        tensor = self.inputs.setdefault((expression.value, place, (*indices, mask)), len(self.inputs))
        node = self.builder.load(tensor, expression.dtype, self._kinds(strides), indices, mask)
        self.places[node] = place
        return node

    def _rounded(self, node: int, dtype: str) -> int:
        """A node as an operator of torch leaves it in memory; 16-bit floats are computed in float32."""
        return node if computed_in(dtype) == dtype else self.builder.apply(f"round_to_{dtype}", node)

    def _scalar(self, number: float | Number, dtype: str) -> int:
        self.scalars.append(number)
        return self.builder.scalar(len(self.scalars) - 1, dtype)

    def _number(self, strides: list[Number], offset: Number) -> int:
        """offset + the sum of index · stride."""
        builder = self.builder
        total: int | None = None
        for axis, stride in enumerate(strides):
            if stride != 0:
                term = builder.index(axis)
                term = term if stride == 1 else builder.apply("mul", term, self._whole(stride))
                total = term if total is None else builder.apply("add", total, term)
        if total is None:
            return self._whole(offset)
        return total if offset == 0 else builder.apply("add", total, self._whole(offset))

    def _whole(self, number: Number) -> int:
        is_symbolic = isinstance(number, Size)
        return self._scalar(number, "int64") if is_symbolic else self.builder.literal(number, "int64")


def _sizes(cuts: list[Number]) -> tuple[Number, ...]:
    """The sizes of the axes between ascending cuts, outermost first."""
    return tuple(quotient(high, low) for low, high in zip((1, *cuts[:-1]), cuts, strict=True))[::-1]
