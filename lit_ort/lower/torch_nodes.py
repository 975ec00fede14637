"""Torch nodes while a graph is lowered: consecutive torch operators, and the views that they read, become one node.

A torch operator takes a transposed or reshaped value as a view for nothing, so views belong to those who read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lit_ort._compat.devices import is_cpu
from lit_ort._compat.torch_fx import arguments_of, first_argument, is_element, is_view, module_name
from lit_ort._compat.torch_ops import BY_STRIDES, OpOverload, is_pointwise, out_overload, overload_name, result_count
from lit_ort.errors import ConvertError
from lit_ort.ops import OPERATORS
from lit_ort.runtime.buffers import SMALL_BYTES
from lit_ort.runtime.program import AS_BYTES, AS_IS, AS_REAL, Statement, TorchNode
from lit_ort.runtime.words import SIZE, SLOT, word_for

aten = torch.ops.aten
# Operators with an out= form that computes straight into it, beside those that torch marks as pointwise. Layer
# normalisation's computes into fresh memory and copies: at [512, 768] 78 us for 57 in the forward, 90 for 69 in the
# backward.
_INTO_MEMORY = frozenset(
    {aten.cat.default, aten.sum.dim_IntList, aten.mean.dim, aten.index_select.default}
    | {aten._softmax.default, aten._softmax_backward_data.default}
    | {aten._log_softmax.default, aten._log_softmax_backward_data.default}
)
# Numbers that nodes take: sizes, and what is computed from them.
_SIZES = (int, float, torch.SymInt, torch.SymFloat)


def form_of(dtype: torch.dtype) -> str:
    """How values of a type cross the border of a torch node."""
    return AS_BYTES if dtype == torch.bool else AS_REAL if dtype.is_complex else AS_IS


class Region:
    """A torch node in the making.

    Args:
        size_index: the position of a symbolic size among the phase's terms.
    """

    def __init__(self, size_index: Callable[[Any], int]) -> None:
        self._size_index = size_index
        self._slots: dict[fx.Node, int] = {}
        self._count = 0
        self._statements: list[tuple[Statement, list[int]]] = []
        self.inputs: list[fx.Node] = []
        self.computed: dict[fx.Node, None] = {}

    def add(self, node: fx.Node, stream: int | None) -> None:
        """Appends an operator, with the views that it reads.

        Raises:
            ConvertError: an argument that a torch node can't be told.
        """
        self._append(node, stream)
        self.computed[node] = None

    def compute(self, node: fx.Node) -> None:
        """Makes a view of a value that is computed here one of the node's own values."""
        self._slot(node)
        self.computed[node] = None

    def materialize(self, node: fx.Node) -> None:
        """Appends a copy of a view in memory of its own."""
        slot = self._slot(node)
        copy = self._define(1)
        kwargs = {"memory_format": {"torch": "contiguous_format"}}
        self._statements.append((Statement("aten.clone.default", ({SLOT: slot},), kwargs), copy))
        self._slots[node] = copy[0]
        self.computed[node] = None

    def has(self, node: fx.Node) -> bool:
        """Whether a value is computed here."""
        return node in self.computed or (is_element(node) and node.args[0] in self.computed)

    def close(self, outputs: list[fx.Node]) -> TorchNode:
        """The node, with these of its values as outputs."""
        order = {self._slots[node]: k for k, node in enumerate(self.inputs)}
        anchored = all(node.op == "get_attr" for node in self.inputs)
        if anchored:
            order[-1] = len(order)
        for _, defined in self._statements:
            order.update({slot: len(order) + k for k, slot in enumerate(defined)})
        statements = [_renumbered(statement, order) for statement, _ in self._statements]
        return TorchNode(
            (*(form_of(node.meta["val"].dtype) for node in self.inputs), *([AS_IS] if anchored else [])),
            tuple(statements),
            tuple(order[self._slots[node]] for node in outputs),
            tuple(form_of(node.meta["val"].dtype) for node in outputs),
            anchored,
        )

    def _define(self, count: int) -> list[int]:
        self._count += count
        return list(range(self._count - count, self._count))

    def _slot(self, node: fx.Node) -> int:
        if node not in self._slots:
            if is_element(node) and node.args[0] in self.computed:
                raise AssertionError(f"{node.name} is defined with its operator")
            if is_view(node):
                self._append(node, None)
            else:
                self.inputs.append(node)
                self._slots[node] = self._define(1)[0]
        return self._slots[node]

    def _append(self, node: fx.Node, stream: int | None) -> None:
        assert isinstance(node.target, OpOverload)
        try:
            args = tuple(word_for(argument, self._word) for argument in node.args)
            if node.target in BY_STRIDES:
                args = ({SLOT: self._contiguous_slot(first_argument(node))}, *args[1:])
            kwargs = {name: word_for(argument, self._word) for name, argument in node.kwargs.items()}
            memory = self._memory(node) if stream is None else {}
        except TypeError as error:
            raise ConvertError(
                str(error), remedy="Run this operation outside of the step.", operator=str(node.target)
            ) from error
        # A check of values has none of its own.
        value = node.meta.get("val")
        results = len(value) if isinstance(value, (tuple, list)) else result_count(node.target)
        defined = self._define(results)
        statement = Statement(
            str(node.target), args, kwargs, results, stream=stream, module=module_name(node), **memory
        )
        self._statements.append((statement, defined))
        if isinstance(value, torch.Tensor):
            self._slots[node] = defined[0]
        for user in node.users:
            if is_element(user):
                self._slots[user] = defined[arguments_of(user)[1]]

    def _word(self, value: Any) -> dict[str, int] | None:
        if isinstance(value, fx.Node):
            example = value.meta.get("val")
            if isinstance(example, torch.Tensor):
                return {SLOT: self._slot(value)}
            if not isinstance(example, _SIZES):
                raise TypeError(f"an argument is {value.name}, a {type(example).__name__} computed in the graph")
            value = example
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return {SIZE: self._size_index(value)}
        if isinstance(value, torch.SymBool):
            raise TypeError("an argument is a truth value computed from sizes")
        return None

    def _memory(self, node: fx.Node) -> dict[str, Any]:
        """The out= form of an operator with a large result."""
        value, target = node.meta.get("val"), node.target
        assert isinstance(target, OpOverload)
        if target in OPERATORS or not isinstance(value, torch.Tensor) or not _is_large(value):
            return {}
        out = out_overload(target)
        if out is None or not (is_pointwise(target) or target in _INTO_MEMORY):
            return {}
        shape = tuple(word_for(size, self._word) for size in value.shape)
        return {"out": overload_name(out), "shape": shape, "dtype": value.dtype}

    def _contiguous_slot(self, node: fx.Node) -> int:
        """A value in the strides that AOTAutograd traced it with."""
        value = node.meta["val"]
        if home(node).op == "placeholder" or not value.is_contiguous() or value.storage_offset() != 0:
            raise ConvertError(
                f"the graph reads {node.name} by strides, and sessions take inputs and keep values contiguous",
                remedy="Use reshape, permute or slices instead of as_strided.",
                operator="aten.as_strided",
            )
        slot = self._slot(node)
        defined = self._define(1)
        self._statements.append((Statement("aten.contiguous.default", ({SLOT: slot},), {}), defined))
        return defined[0]


def home(node: fx.Node) -> fx.Node:
    """The node whose memory a view lies in."""
    while is_view(node):
        node = first_argument(node)
    return node


def _is_large(value: torch.Tensor) -> bool:
    """Whether memory of a pool pays; where a size changes, the pool itself tells at every run."""
    if not value.is_contiguous() or not is_cpu(value.device):
        return False
    if any(isinstance(size, torch.SymInt) for size in value.shape):
        return True
    return value.numel() * value.dtype.itemsize >= SMALL_BYTES


def _renumbered(statement: Statement, order: dict[int, int]) -> Statement:
    def word(given: Any) -> Any:
        if isinstance(given, dict):
            return {SLOT: order[given[SLOT]]} if SLOT in given else given
        return [word(part) for part in given] if isinstance(given, list) else given

    return dataclasses.replace(
        statement,
        args=tuple(word(part) for part in statement.args),
        kwargs={name: word(part) for name, part in statement.kwargs.items()},
    )
