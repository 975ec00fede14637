"""A region: an iteration space, and a DAG of expressions over loads, with the values that it stores.

The space has row axes, which run in parallel, and inner axes, the last of which runs in vectors. A value is *full* (one
for each point of the space) or *row-level* (one for each row). Sizes, strides, offsets and scalars are arguments of a
run, so one region serves all sizes; what is fixed are the ranks, the dtypes, and whether an inner stride is 0, 1 or
any.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from lit_ort.regions.element_types import computed_in

BROADCAST, CONTIGUOUS, STRIDED = "0", "1", "s"
# A sum of float32 whose parts are added in float64, as rounding errors grow with the number of terms.
LONG_SUM = "long_sum"
REDUCTIONS = ("sum", LONG_SUM, "prod", "max", "min", "any", "all")


@dataclass(frozen=True)
class Access:
    """How the points of the space map to elements of a tensor: offset + the sum of index · stride, all given at a run.

    Args:
        tensor: the position among the inputs, or among the outputs.
        dtype: the dtype in memory.
        inner: for each inner axis, whether its stride is 0 (`BROADCAST`), 1 (`CONTIGUOUS`, the last axis alone) or any.
    """

    tensor: int
    dtype: str
    inner: str

    @property
    def is_full(self) -> bool:
        return any(stride != BROADCAST for stride in self.inner)


@dataclass(frozen=True)
class Load:
    """Elements of an input.

    Args:
        access: where they are.
        indices: nodes, each int64; the element's address grows by index · stride of that index. An index outside of its
            size is an error of the run.
        mask: a bool node; where it is False nothing is loaded, and the value is 0. None loads everywhere.
    """

    access: Access
    indices: tuple[int, ...] = ()
    mask: int | None = None

    @property
    def dtype(self) -> str:
        return computed_in(self.access.dtype)


@dataclass(frozen=True)
class Literal:
    """A number that is part of the code."""

    value: float | int | bool
    dtype: str


@dataclass(frozen=True)
class Scalar:
    """A number that is given at a run: float64 for float dtypes and int64 for the others, cast to the dtype."""

    position: int
    dtype: str


@dataclass(frozen=True)
class Index:
    """The index along an axis of the space: row axes first, then inner ones."""

    axis: int
    dtype: str = "int64"


@dataclass(frozen=True)
class Apply:
    """An operator of `pointwise_table.OPERATORS` on nodes."""

    operator: str
    args: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Reduce:
    """A reduction of a full node over all inner axes, which yields a row-level value."""

    kind: str
    arg: int
    dtype: str


Node = Load | Literal | Scalar | Index | Apply | Reduce


@dataclass(frozen=True)
class Store:
    """Writes a node to an output.

    Args:
        access: where to; outputs don't overlap with inputs or with each other.
        value: the node; a full one needs a full access.
        target: a row-level node of int64, which selects the row of the output that each row is added to: a scatter. All
            that it can select is 0 before.
        start: the input, of the output's layout and dtype, whose elements are there before instead of 0.
    """

    access: Access
    value: int
    target: int | None = None
    start: int | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        """The nodes that select a place, as those of a load."""
        return () if self.target is None else (self.target,)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that it refers to."""
        return (self.value, *self.indices)


@dataclass(frozen=True)
class ColumnReduction:
    """A reduction over all row axes, written to an output.

    Of a full node it has a value for each point of the inner axes, of a row-level node a single one.
    """

    kind: str
    value: int
    access: Access


@dataclass(frozen=True)
class Region:
    """One iteration space and what is computed in it.

    Args:
        rows: the number of row axes.
        inner: the number of inner axes, at least 1.
        nodes: each refers to earlier ones alone.
        stores: what is written.
        columns: reductions over the rows.
    """

    rows: int
    inner: int
    nodes: tuple[Node, ...]
    stores: tuple[Store, ...] = ()
    columns: tuple[ColumnReduction, ...] = ()

    @cached_property
    def full(self) -> tuple[bool, ...]:
        """Whether each node has a value for each point, rather than for each row."""
        full: list[bool] = []
        for node in self.nodes:
            if isinstance(node, Load):
                full.append(node.access.is_full or any(full[arg] for arg in arguments_of(node)))
            elif isinstance(node, Index):
                full.append(node.axis >= self.rows)
            else:
                full.append(isinstance(node, Apply) and any(full[arg] for arg in node.args))
        return tuple(full)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """The loads in the order of their nodes, which is that of their strides among the arguments of a run."""
        return tuple(node for node in self.nodes if isinstance(node, Load))

    @cached_property
    def scalars(self) -> int:
        """The number of scalars."""
        return 1 + max((node.position for node in self.nodes if isinstance(node, Scalar)), default=-1)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The dtype of each input."""
        starts = [replace(s.access, tensor=s.start) for s in self.stores if s.start is not None]
        return _dtypes([*(load.access for load in self.loads), *starts])

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The dtype of each output."""
        return _dtypes([store.access for store in self.stores] + [column.access for column in self.columns])

    @cached_property
    def key(self) -> str:
        """A hash of the content, equal in all processes."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def to_json(self) -> str:
        return json.dumps(_encoded(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Region:
        """The region of `to_json`.

        Raises:
            ValueError: the text is not that of a region, or the region is not valid.
        """
        try:
            region = _decoded(json.loads(text))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"This is not the text of a region ({error!r}). Write it by Region.to_json.") from error
        check(region)
        return region

    @property
    def summary(self) -> str:
        """What it computes, in a line: its operators, and what it reduces."""
        applied = dict.fromkeys(node.operator for node in self.nodes if isinstance(node, Apply))
        reduced = dict.fromkeys(f"{node.kind} of a row" for node in self.nodes if isinstance(node, Reduce))
        columns = dict.fromkeys(f"{column.kind} over rows" for column in self.columns)
        return ", ".join(part for part in (" ".join(applied), *reduced, *columns) if part) or "copy"

    def __str__(self) -> str:
        axes = [f"r{axis}" for axis in range(self.rows)] + [f"c{axis}" for axis in range(self.inner)]
        lines = [f"region over {' '.join(axes[: self.rows]) or 'one row'} | {' '.join(axes[self.rows :])}"]
        for number, node in enumerate(self.nodes):
            level = "" if self.full[number] else "  # a row"
            lines.append(f"  %{number}: {node.dtype} = {_text(node, axes)}{level}")
        for store in self.stores:
            start = "0" if store.start is None else f"in{store.start}"
            verb, at = ("store", "") if store.target is None else (f"add to {start} in", f", at %{store.target}")
            lines.append(f"  {verb} out{_place(store.access)}{at} <- %{store.value}")
        for column in self.columns:
            lines.append(f"  {column.kind} over rows out{_place(column.access)} <- %{column.value}")
        return "\n".join(lines)


def arguments_of(node: Node) -> tuple[int, ...]:
    """The nodes that a node refers to."""
    if isinstance(node, Apply):
        return node.args
    if isinstance(node, Reduce):
        return (node.arg,)
    if isinstance(node, Load):
        return node.indices if node.mask is None else (*node.indices, node.mask)
    return ()


def check(region: Region) -> None:
    """Check that a region is consistent.

    Raises:
        ValueError: it is not; the message names the node or the store.
    """
    if region.inner < 1 or region.rows < 0:
        raise ValueError(f"A region has {region.rows} row axes and {region.inner} inner axes; it needs one inner axis.")
    nodes = region.nodes
    for number, node in enumerate(nodes):
        where = f"%{number} = {node}"
        if any(not 0 <= arg < number for arg in arguments_of(node)):
            raise ValueError(f"{where} refers to a node that isn't before it.")
        if isinstance(node, Reduce) and (node.kind not in REDUCTIONS or not region.full[node.arg]):
            raise ValueError(f"{where} reduces a row-level value, or by an unknown kind; kinds are {REDUCTIONS}.")
        if isinstance(node, Index) and not 0 <= node.axis < region.rows + region.inner:
            raise ValueError(f"{where} is the index of an axis that the region doesn't have.")
        if isinstance(node, Load):
            _check_access(region, node.access, where)
            _check_indices(region, node.indices, where)
            if node.mask is not None and nodes[node.mask].dtype != "bool":
                raise ValueError(f"The mask of {where} is no bool.")
    for store in region.stores:
        _check_access(region, store.access, str(store))
        if region.full[store.value] and not store.access.is_full:
            raise ValueError(f"{store} writes a full value to a place for each row.")
        _check_indices(region, store.indices, str(store))
        if store.target is not None:
            if region.full[store.target] or (store.access.is_full and store.access.inner[-1] != CONTIGUOUS):
                raise ValueError(f"{store} adds to what no node of a row selects, or not to neighbours.")
        if region.full[store.value] and store.access.inner[-1] == BROADCAST:
            raise ValueError(f"{store} writes the values of the last axis to one place.")
    for column in region.columns:
        _check_access(region, column.access, str(column))
        if column.kind not in REDUCTIONS or (column.access.is_full and not region.full[column.value]):
            raise ValueError(f"{column} is of an unknown kind, or writes a single value to many places.")


def _check_access(region: Region, access: Access, where: str) -> None:
    if len(access.inner) != region.inner or CONTIGUOUS in access.inner[:-1]:
        raise ValueError(f"{where}: {access.inner!r} isn't a stride for each of {region.inner} inner axes.")


def _check_indices(region: Region, indices: Sequence[int], where: str) -> None:
    if any(region.nodes[index].dtype != "int64" for index in indices):
        raise ValueError(f"{where}: an index isn't int64.")


def _dtypes(accesses: Any) -> tuple[str, ...]:
    found = {access.tensor: access.dtype for access in accesses}
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"Tensors {sorted(found)} are used; they are numbered from 0 without a gap.")
    return tuple(found[tensor] for tensor in range(len(found)))


def _place(access: Access) -> str:
    return f"{access.tensor}[{access.inner}] {access.dtype}"


def _text(node: Node, axes: Sequence[str]) -> str:
    if isinstance(node, Load):
        indices = "".join(f", at %{index}" for index in node.indices)
        return f"load in{_place(node.access)}{indices}" + ("" if node.mask is None else f", where %{node.mask}")
    if isinstance(node, Literal):
        return repr(node.value)
    if isinstance(node, Scalar):
        return f"scalar {node.position}"
    if isinstance(node, Index):
        return f"index {axes[node.axis]}"
    if isinstance(node, Apply):
        return f"{node.operator} " + " ".join(f"%{arg}" for arg in node.args)
    return f"{node.kind} over the row of %{node.arg}"


_NODES = {kind.__name__: kind for kind in (Load, Literal, Scalar, Index, Apply, Reduce)}


def _encoded(region: Region) -> dict[str, Any]:
    data = asdict(region)
    for node, entry in zip(region.nodes, data["nodes"], strict=True):
        entry["node"] = type(node).__name__
        if isinstance(node, Literal) and isinstance(node.value, float):
            entry["value"] = {"float": node.value.hex() if math.isfinite(node.value) else repr(node.value)}
    return data


def _decoded(data: dict[str, Any]) -> Region:
    return Region(
        data["rows"],
        data["inner"],
        tuple(_decoded_node(dict(entry)) for entry in data["nodes"]),
        tuple(Store(**{**entry, "access": Access(**entry["access"])}) for entry in data["stores"]),
        tuple(ColumnReduction(**{**entry, "access": Access(**entry["access"])}) for entry in data["columns"]),
    )


def _decoded_node(entry: dict[str, Any]) -> Node:
    kind = _NODES[entry.pop("node")]
    if kind is Load:
        return Load(**{**entry, "access": Access(**entry["access"]), "indices": tuple(entry["indices"])})
    if kind is Literal and isinstance(entry["value"], dict):
        return Literal(float.fromhex(entry["value"]["float"]), entry["dtype"])
    if kind is Apply:
        entry["args"] = tuple(entry["args"])
    return kind(**entry)
