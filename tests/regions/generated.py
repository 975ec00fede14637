"""Generated regions: layouts, broadcasts, gathers, dtypes, reductions, sizes at the edges of vectors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from lit_ort.regions.element_types import MEMORY_DTYPES, computed_in, is_float
from lit_ort.regions.region import LONG_SUM, Load, Region
from lit_ort.regions.region_builder import RegionBuilder
from lit_ort.regions.region_run import Place, RegionRun

SIZES = (0, 1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 100, 130)
MOST_POINTS = 30_000
INPUT_DTYPES = ("float32", "float32", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
# Operators whose results are exact for short sums of quarters, so that comparisons of them are exact too.
EXACT_BINARY = ("add", "sub", "mul", "maximum", "minimum")
ROUNDED_UNARY = ("exp", "tanh", "sigmoid", "gelu", "silu", "erf", "sin")
NODE_KINDS = ("binary", "binary", "compare", "where", "unary", "reduce", "normalize", "normalize", "index", "literal")
NODE_KINDS += ("random", "cast", "division")
COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")


@dataclass(frozen=True)
class Case:
    """A region, its arguments, and its tensors: inputs, and outputs of the size that it writes to."""

    region: Region
    run: RegionRun
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


@dataclass
class _Drawn:
    draw: Callable[..., Any]
    builder: RegionBuilder
    sizes: tuple[int, ...]
    full: list[int] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    rounded: set[int] = field(default_factory=set)
    inputs: list[torch.Tensor] = field(default_factory=list)
    loads: dict[int, Place] = field(default_factory=dict)

    def one_of(self, choices: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(choices))

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) < percent

    @property
    def rows(self) -> int:
        return self.builder.rows

    def keep(self, node: int, *arguments: int, rounds: bool = False) -> None:
        """Make a new node a candidate for what follows."""
        known = self.full + self.row
        if node in known:
            return
        is_full = not arguments or any(argument in self.full for argument in arguments)
        (self.full if is_full else self.row).append(node)
        if rounds or any(argument in self.rounded for argument in arguments):
            self.rounded.add(node)


def layout(drawn: _Drawn, *, axes: Sequence[int], broadcasts: bool) -> tuple[int, list[int], int]:
    """(offset, strides, elements): a permuted layout over axes, with gaps, and broadcasts of some axes."""
    sizes = drawn.sizes
    strides, step = [0] * len(sizes), drawn.one_of((1, 1, 1, 2, 3))
    order = list(axes)
    if drawn.chance(35):
        order = list(drawn.draw(st.permutations(order)))
    for axis in reversed(order):
        if broadcasts and drawn.chance(25):
            continue
        strides[axis] = step
        step *= max(sizes[axis], 1) + drawn.one_of((0, 0, 0, 1, 7))
    offset = drawn.one_of((0, 0, 1, 5))
    # A row-level value has an element for each row, also if the rows are empty.
    visited = sizes if any(strides[drawn.rows :]) else sizes[: drawn.rows]
    last = sum((size - 1) * stride for size, stride in zip(visited, strides, strict=False))
    return offset, strides, 0 if 0 in visited else offset + last + 1


def kinds(strides: Sequence[int], rows: int) -> str:
    """The static kinds of inner strides."""
    inner = strides[rows:]
    fixed = ["0" if stride == 0 else "s" for stride in inner]
    if inner[-1] == 1:
        fixed[-1] = "1"
    return "".join(fixed)


def numbers(drawn: _Drawn, count: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(drawn.draw(st.integers(0, 1000)))
    if dtype == "bool":
        return torch.randint(0, 2, (count,), generator=generator).bool()
    whole = torch.randint(0 if dtype == "uint8" else -8, 9, (count,), generator=generator)
    values = whole / 4 if is_float(dtype) else whole
    return values.to(MEMORY_DTYPES[dtype])


def add_input(drawn: _Drawn) -> None:
    """A load, maybe through an index or under a mask."""
    dtype = drawn.one_of(INPUT_DTYPES)
    rows = drawn.rows
    everything = range(len(drawn.sizes))
    axes = list(everything) if drawn.chance(75) else list(everything)[: max(rows, 1)]
    offset, strides, count = layout(drawn, axes=axes, broadcasts=True)
    indices, index_places = [], ()
    integers = [node for node in drawn.full + drawn.row if drawn.builder.nodes[node].dtype == "int64"]
    if integers and drawn.chance(40):
        size = drawn.one_of((1, 3, 20))
        index = drawn.builder.apply("remainder", drawn.one_of(integers), drawn.builder.literal(size, "int64"))
        stride = max(count, 1)
        indices, index_places = [index], ((stride, size),)
        count += (size - 1) * stride if count else 0
    mask = None
    bools = [node for node in drawn.full + drawn.row if drawn.builder.nodes[node].dtype == "bool"]
    if bools and drawn.chance(40):
        mask = drawn.one_of(bools)
    before = len(drawn.builder.nodes)
    node = drawn.builder.load(len(drawn.inputs), dtype, kinds(strides, rows), indices, mask)
    assert node == before
    drawn.loads[node] = Place(offset, tuple(strides), index_places)
    drawn.inputs.append(numbers(drawn, count, dtype))
    others = [*indices, *([] if mask is None else [mask])]
    is_full = any(strides[rows:]) or any(_is_full(drawn, other) for other in others)
    (drawn.full if is_full else drawn.row).append(node)


def _is_full(drawn: _Drawn, node: int) -> bool:
    region = Region(drawn.builder.rows, drawn.builder.inner, tuple(drawn.builder.nodes))
    return region.full[node]


def add_node(drawn: _Drawn) -> None:
    builder = drawn.builder
    known = drawn.full + drawn.row
    kind = drawn.one_of(NODE_KINDS)
    x, y = drawn.one_of(known), drawn.one_of(known)
    dtypes = builder.nodes[x].dtype, builder.nodes[y].dtype
    if kind == "binary" and "bool" not in dtypes:
        drawn.keep(builder.apply(drawn.one_of(EXACT_BINARY), x, y), x, y)
    elif kind == "compare" and not {x, y} & drawn.rounded:
        drawn.keep(builder.apply(drawn.one_of(COMPARISONS), x, y), x, y)
    elif kind == "where" and dtypes[0] == "bool":
        z = drawn.one_of(known)
        drawn.keep(builder.apply("where", x, y, z), x, y, z)
    elif kind == "unary" and is_float(dtypes[0]):
        limited = builder.apply("clamp", x, -4.0, 4.0)
        drawn.keep(builder.apply(drawn.one_of(ROUNDED_UNARY), limited), x, rounds=True)
    elif kind == "reduce" and x in drawn.full:
        reductions = ("any", "all") if dtypes[0] == "bool" else (*_sums(dtypes[0]), "max", "min")
        node = builder.reduce(drawn.one_of(reductions), x)
        if node not in known:
            drawn.row.append(node)
            if x in drawn.rounded or is_float(builder.nodes[node].dtype):
                drawn.rounded.add(node)
    elif kind == "normalize" and x in drawn.full and is_float(dtypes[0]):
        limited = builder.apply(drawn.one_of(ROUNDED_UNARY), builder.apply("clamp", x, -4.0, 4.0))
        drawn.keep(builder.apply("sub", limited, builder.reduce(drawn.one_of(("sum", "max")), limited)), x, rounds=True)
    elif kind == "index":
        axis = drawn.draw(st.integers(0, len(drawn.sizes) - 1))
        node = builder.index(axis)
        if node not in known:
            (drawn.full if axis >= drawn.rows else drawn.row).append(node)
    elif kind == "literal":
        drawn.keep(builder.apply("add", x, builder.literal(1, dtypes[0])), x) if dtypes[0] != "bool" else None
    elif kind == "random":
        last = builder.index(len(drawn.sizes) - 1)
        row = builder.index(0) if drawn.chance(60) else builder.literal(3, "int64")
        seed = builder.literal(drawn.one_of((1234, -1, 2**62 + 5)), "int64")
        node = builder.apply("random", seed, builder.literal(7, "int64"), row, last)
        if node not in known:
            drawn.full.append(node)
    elif kind == "cast" and x not in drawn.rounded and dtypes[0] != "bool":
        drawn.keep(builder.cast(x, drawn.one_of(("float32", "int64", "float64"))), x)
    elif kind == "division" and dtypes[0] == "int64":
        drawn.keep(builder.apply("floor_divide", x, builder.literal(3, "int64")), x)


def _sums(dtype: str) -> tuple[str, str]:
    return "sum", LONG_SUM if dtype == "float32" else "sum"


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    rows, inner = draw(st.integers(0, 2)), draw(st.sampled_from((1, 1, 1, 2)))
    sizes = tuple(draw(st.sampled_from(SIZES)) for _ in range(rows + inner))
    while math.prod(sizes) > MOST_POINTS:
        sizes = tuple(max(size // 2, 1) for size in sizes)
    drawn = _Drawn(draw, RegionBuilder(rows, inner), sizes)
    for _ in range(draw(st.integers(1, 3))):
        add_input(drawn)
    for _ in range(draw(st.integers(1, 9))):
        add_node(drawn)
        if drawn.chance(15):
            add_input(drawn)
    return _stored(drawn)


def _stored(drawn: _Drawn) -> Case:
    builder, rows = drawn.builder, drawn.rows
    full = Region(rows, builder.inner, tuple(builder.nodes)).full
    candidates = [*drawn.full[-3:], *drawn.row[-2:]]
    chosen = [node for node in dict.fromkeys(candidates) if drawn.chance(70)] or candidates[-1:]
    outputs, stores, columns = [], [], []
    for node in chosen:
        dtype = builder.nodes[node].dtype
        dtype = drawn.one_of((dtype, "bfloat16", "float16")) if dtype == "float32" else dtype
        if drawn.chance(35) and dtype != "bool":
            axes = list(range(rows, len(drawn.sizes))) if full[node] else []
            offset, strides, _ = layout(drawn, axes=axes, broadcasts=False)
            inner = "".join("s" for _ in range(builder.inner)) if full[node] else "0" * builder.inner
            inner = kinds(strides, rows) if full[node] else inner
            builder.column(len(outputs), dtype, inner, drawn.one_of((*_sums(computed_in(dtype)), "max", "min")), node)
            columns.append(Place(offset, tuple(strides)))
            sizes = drawn.sizes[rows:] if full[node] else ()
            last = sum((size - 1) * stride for size, stride in zip(sizes, strides[rows:], strict=False))
            count = 0 if full[node] and 0 in sizes else offset + last + 1
        else:
            axes = list(range(len(drawn.sizes))) if full[node] else list(range(rows))
            offset, strides, count = layout(drawn, axes=axes, broadcasts=False)
            if not full[node]:
                count = offset + sum((n - 1) * s for n, s in zip(drawn.sizes[:rows], strides[:rows], strict=True)) + 1
                count = 0 if 0 in drawn.sizes[:rows] else count
            builder.store(len(outputs), dtype, kinds(strides, rows), node)
            stores.append(Place(offset, tuple(strides)))
        outputs.append(torch.full((count,), 3).to(MEMORY_DTYPES[dtype]))
    return _case(drawn, outputs, stores, columns)


def _case(drawn: _Drawn, outputs: list[torch.Tensor], stores: list[Place], columns: list[Place]) -> Case:
    """The case with what nothing needs left out: loads and inputs are numbered anew."""
    builder = drawn.builder
    region = builder.region()
    used = [old for old in builder.needed() if isinstance(builder.nodes[old], Load)]
    loads = [drawn.loads[old] for old in used]
    tensors = [builder.nodes[old].access.tensor for old in used]  # type: ignore[union-attr]
    renumbered = {tensor: at for at, tensor in enumerate(sorted(set(tensors)))}
    region = _with_inputs(region, renumbered)
    inputs = tuple(drawn.inputs[tensor] for tensor in sorted(renumbered))
    return Case(region, RegionRun(drawn.sizes, tuple(loads), tuple(stores), tuple(columns)), inputs, tuple(outputs))


def _with_inputs(region: Region, renumbered: dict[int, int]) -> Region:
    nodes = tuple(
        dataclasses.replace(node, access=dataclasses.replace(node.access, tensor=renumbered[node.access.tensor]))
        if isinstance(node, Load)
        else node
        for node in region.nodes
    )
    return dataclasses.replace(region, nodes=nodes)


def close(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether results agree, apart from the order of sums."""
    if not wanted.dtype.is_floating_point:
        return torch.equal(result, wanted)
    low = wanted.dtype in (torch.bfloat16, torch.float16)
    tolerance = 2e-2 if low else 2e-4
    return torch.allclose(result.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
