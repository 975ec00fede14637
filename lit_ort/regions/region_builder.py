"""Makes regions node by node: equal nodes are one node, and dtypes are promoted as torch does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import torch

from lit_ort.regions.element_types import MEMORY_DTYPES, computed_in, is_float, name_of
from lit_ort.regions.pointwise_table import CHOOSE, FLOAT, OPERATORS, RANDOM, Pointwise, result_dtype
from lit_ort.regions.region import (
    Access,
    Apply,
    ColumnReduction,
    Index,
    Literal,
    Load,
    Node,
    Reduce,
    Region,
    Scalar,
    Store,
    arguments_of,
    check,
)


class RegionBuilder:
    """The nodes of a region that is being made; methods return the number of a node.

    Args:
        rows: the number of row axes.
        inner: the number of inner axes.
    """

    def __init__(self, rows: int = 1, inner: int = 1) -> None:
        self.rows, self.inner = rows, inner
        self.nodes: list[Node] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._stores: list[Store] = []
        self._columns: list[ColumnReduction] = []

    def add(self, node: Node) -> int:
        """The number of a node."""
        # 0.0 == -0.0, 1 == True and nan != nan: the text tells apart what equality does not.
        key = (node, repr(node.value)) if isinstance(node, Literal) else (node,)
        if isinstance(node, Literal) and node.value != node.value:
            key = (Literal, node.dtype, "nan")
        if key not in self._numbers:
            self.nodes.append(node)
            self._numbers[key] = len(self.nodes) - 1
        return self._numbers[key]

    def load(self, tensor: int, dtype: str, inner: str, indices: Sequence[int] = (), mask: int | None = None) -> int:
        return self.add(Load(Access(tensor, dtype, inner), tuple(indices), mask))

    def literal(self, value: float | int | bool, dtype: str) -> int:
        if is_float(dtype):
            return self.add(Literal(float(value), dtype))
        return self.add(Literal(bool(value) if dtype == "bool" else int(value), dtype))

    def scalar(self, position: int, dtype: str) -> int:
        return self.add(Scalar(position, dtype))

    def index(self, axis: int) -> int:
        return self.add(Index(axis))

    def cast(self, node: int, dtype: str) -> int:
        """A node in another dtype."""
        return node if self.nodes[node].dtype == dtype else self.add(Apply("cast", (node,), dtype))

    def apply(self, name: str, *args: int | float | bool) -> int:
        """An operator on nodes (ints) and numbers (floats and bools), cast to a common dtype as torch promotes them.

        Raises:
            KeyError: the operator is not in the table.
        """
        operator = OPERATORS[name]
        dtypes = self._dtypes(operator, args)
        nodes = tuple(
            self.cast(arg, dtype) if _is_node(arg) else self.literal(arg, dtype)
            for arg, dtype in zip(args, dtypes, strict=True)
        )
        return self.add(Apply(name, nodes, result_dtype(operator, dtypes)))

    def _dtypes(self, operator: Pointwise, args: Sequence[int | float | bool]) -> tuple[str, ...]:
        if operator.rule == RANDOM:
            return ("int64",) * len(args)
        first = 1 if operator.rule == CHOOSE else 0
        dtype = self.promoted(args[first:])
        if operator.rule == FLOAT and not is_float(dtype):
            dtype = "float32"
        return ("bool",) * first + (dtype,) * (len(args) - first)

    def promoted(self, args: Sequence[int | float | bool]) -> str:
        """The common dtype of nodes and numbers."""
        nodes = [MEMORY_DTYPES[self.nodes[arg].dtype] for arg in args if _is_node(arg)]
        dtype = nodes[0]
        for other in nodes[1:]:
            dtype = torch.promote_types(dtype, other)
        for number in (arg for arg in args if not _is_node(arg)):
            dtype = torch.result_type(torch.empty(1, dtype=dtype), number)
        name = name_of(dtype)
        assert name is not None
        return computed_in(name)

    def spread(self, node: int) -> int:
        """A node as a full one."""
        if self._is_full(node):
            return node
        last = self.index(self.rows + self.inner - 1)
        return self.add(
            Apply("where", (self.apply("ge", last, self.literal(0, "int64")), node, node), self._dtype(node))
        )

    def _dtype(self, node: int) -> str:
        return self.nodes[node].dtype

    def _is_full(self, node: int) -> bool:
        return Region(self.rows, self.inner, tuple(self.nodes)).full[node]

    def reduce(self, kind: str, node: int) -> int:
        """A reduction over all inner axes; a sum or product of integers is int64, `any` and `all` are of bools."""
        if kind in ("any", "all"):
            node = self.cast(node, "bool")
        elif kind in ("sum", "prod") and not is_float(self.nodes[node].dtype):
            node = self.cast(node, "int64")
        return self.add(Reduce(kind, self.spread(node), self.nodes[node].dtype))

    def store(self, tensor: int, dtype: str, inner: str, node: int) -> None:
        self._stores.append(Store(Access(tensor, dtype, inner), self.cast(node, computed_in(dtype))))

    def scatter(self, tensor: int, dtype: str, inner: str, node: int, row: int, start: int | None) -> None:
        """Adds each row of a node to one of the output, which is 0 before, or the elements of an input."""
        access = Access(tensor, dtype, inner)
        self._stores.append(Store(access, self.cast(node, computed_in(dtype)), row, start))

    def column(self, tensor: int, dtype: str, inner: str, kind: str, node: int) -> None:
        """A reduction over all rows."""
        node = self.cast(node, computed_in(dtype))
        node = self.spread(node) if Access(tensor, dtype, inner).is_full else node
        self._columns.append(ColumnReduction(kind, node, Access(tensor, dtype, inner)))

    def needed(self) -> list[int]:
        """The nodes that stores need, in order."""
        needed = {column.value for column in self._columns}
        needed.update(node for store in self._stores for node in store.nodes)
        for number in reversed(range(len(self.nodes))):
            if number in needed:
                needed.update(arguments_of(self.nodes[number]))
        return sorted(needed)

    def region(self) -> Region:
        """The region of what is stored; nodes that nothing needs are left out.

        Raises:
            ValueError: it is not consistent.
        """
        needed = self.needed()
        new = {old: position for position, old in enumerate(needed)}
        region = Region(
            self.rows,
            self.inner,
            tuple(_renumbered(self.nodes[old], new) for old in needed),
            tuple(
                replace(store, value=new[store.value], target=None if store.target is None else new[store.target])
                for store in self._stores
            ),
            tuple(ColumnReduction(column.kind, new[column.value], column.access) for column in self._columns),
        )
        check(region)
        return region


def _is_node(arg: int | float | bool) -> TypeGuard[int]:
    return isinstance(arg, int) and not isinstance(arg, bool)


def _renumbered(node: Node, new: dict[int, int]) -> Node:
    if isinstance(node, Apply):
        return Apply(node.operator, tuple(new[arg] for arg in node.args), node.dtype)
    if isinstance(node, Reduce):
        return Reduce(node.kind, new[node.arg], node.dtype)
    if isinstance(node, Load):
        mask = None if node.mask is None else new[node.mask]
        return Load(node.access, tuple(new[index] for index in node.indices), mask)
    return node
