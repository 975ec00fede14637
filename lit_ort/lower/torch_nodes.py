"""Builds torch nodes from consecutive torch operators and the views that these read.

Torch reads a transposed or reshaped value as a view without a copy, so each node creates the views that it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from lit_ort._compat.devices import is_cpu
from lit_ort._compat.torch_fx import arguments_of, base_of, first_argument, is_element, is_view, module_name
from lit_ort._compat.torch_ops import (
    BY_STRIDES,
    CONTIGUOUS,
    IMAGES_IN_ONE_FORMAT,
    LAST_DIMENSION_CONTIGUOUS,
    OpOverload,
    is_pointwise,
    out_overload,
    overload_name,
    result_count,
)
from lit_ort._compat.torch_sizes import channels_last, has_channels_last, inverse_order, memory_order
from lit_ort.errors import ConvertError
from lit_ort.ops import OPERATORS
from lit_ort.runtime.argument_codec import SIZE, SLOT, word_for
from lit_ort.runtime.buffers import SMALL_BYTES
from lit_ort.runtime.program import AS_BYTES, AS_IS, AS_REAL, LargeResult, Statement, TorchNode

aten = torch.ops.aten
# Operators whose out= overload computes directly into the given memory, besides those that torch tags as pointwise.
# Layer normalization's allocates a result and copies it: at [512, 768], this takes 78 us instead of 57 in the forward,
# and 90 us instead of 69 in the backward.
_INTO_MEMORY = frozenset(
    {aten.cat.default, aten.sum.dim_IntList, aten.mean.dim, aten.index_select.default}
    | {aten._softmax.default, aten._softmax_backward_data.default}
    | {aten._log_softmax.default, aten._log_softmax_backward_data.default}
)
# Types of the numbers that torch nodes support: sizes and expressions of sizes.
_SIZES = (int, float, torch.SymInt, torch.SymFloat)


def form_of(dtype: torch.dtype) -> str:
    """How values of a dtype are passed to and from a torch node."""
    return AS_BYTES if dtype == torch.bool else AS_REAL if dtype.is_complex else AS_IS


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A value that a statement of a node has computed."""

    position: int


class NodeBuilder:
    """A torch node while it is built.

    Args:
        size_index: returns the position of a symbolic size among the phase's terms.
        orders: for values whose dimensions the session has in another order, this order.
    """

    def __init__(self, size_index: Callable[[Any], int], orders: Mapping[fx.Node, list[int]]) -> None:
        self._size_index, self._orders = size_index, orders
        self._slots: dict[fx.Node, int] = {}
        self._slots_of_inputs: dict[fx.Node, int] = {}
        self._count = 0
        self._statements: list[tuple[Statement, list[int]]] = []
        self.inputs: list[fx.Node] = []
        self.computed: dict[fx.Node, None] = {}

    def add(self, node: fx.Node, stream: int | None) -> None:
        """Appends an operator and the views that it reads.

        Raises:
            ConvertError: an argument has a type that torch nodes don't support.
        """
        self._append(node, stream)
        self.computed[node] = None

    def compute(self, node: fx.Node) -> None:
        """Adds a view of a value of this node to the values that can be outputs."""
        self._slot(node)
        self.computed[node] = None

    def materialize(self, node: fx.Node) -> None:
        """Appends a copy of a view."""
        slot = self._slot(node)
        copy = self._new_slots(1)
        kwargs = {"memory_format": {"torch": "contiguous_format"}}
        self._statements.append((Statement("aten.clone.default", ({SLOT: slot},), kwargs), copy))
        self._slots[node] = copy[0]
        self.computed[node] = None

    def has(self, node: fx.Node) -> bool:
        """Whether a value is computed in this node."""
        return node in self.computed or (is_element(node) and node.args[0] in self.computed)

    def close(self, outputs: list[fx.Node]) -> TorchNode:
        """Return the torch node, with these values as outputs."""
        results = [self._in_session(node) for node in outputs]
        order = {self._slots_of_inputs[node]: k for k, node in enumerate(self.inputs)}
        anchored = all(node.op == "get_attr" for node in self.inputs)
        if anchored:
            order[-1] = len(order)
        for _, slots in self._statements:
            order.update({slot: len(order) + k for k, slot in enumerate(slots)})
        statements = [_renumbered(statement, order) for statement, _ in self._statements]
        return TorchNode(
            (*(form_of(node.meta["val"].dtype) for node in self.inputs), *([AS_IS] if anchored else [])),
            tuple(statements),
            tuple(order[slot] for slot in results),
            tuple(form_of(node.meta["val"].dtype) for node in outputs),
            anchored,
        )

    def _new_slots(self, count: int) -> list[int]:
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
                slot = self._slots_of_inputs[node] = self._new_slots(1)[0]
                order = self._orders.get(node)
                self._slots[node] = slot if order is None else self._permuted(slot, inverse_order(order))
        return self._slots[node]

    def _in_session(self, node: fx.Node) -> int:
        """The slot of an output, with its dimensions in the session's order."""
        order = self._orders.get(node)
        return self._slots[node] if order is None else self._permuted(self._slots[node], order)

    def _append(self, node: fx.Node, stream: int | None) -> None:
        assert isinstance(node.target, OpOverload)
        try:
            args = self._arguments(node)
            kwargs = {name: word_for(argument, self._word) for name, argument in node.kwargs.items()}
            out = _large_out(node) if stream is None else None
            large = self._large_results(node) if stream is None and (out or _allocates(node)) else ()
        except TypeError as error:
            raise ConvertError(
                str(error), remedy="Run this operation outside of the step.", operator=str(node.target)
            ) from error
        # An assertion has no result.
        value = node.meta.get("val")
        results = len(value) if isinstance(value, (tuple, list)) else result_count(node.target)
        slots = self._new_slots(results)
        statement = Statement(
            str(node.target),
            args,
            kwargs,
            results,
            out=out,
            large=large,
            stream=stream,
            module=module_name(node),
        )
        self._statements.append((statement, slots))
        if isinstance(value, torch.Tensor):
            self._slots[node] = slots[0]
        for user in node.users:
            if is_element(user):
                self._slots[user] = slots[arguments_of(user)[1]]

    def _arguments(self, node: fx.Node) -> tuple[Any, ...]:
        """The words of an operator's positional arguments, after copies of those whose strides its kernel can't have.

        Raises:
            TypeError: an argument has a type that torch nodes don't support.
        """
        args: list[Any] = list(node.args)
        if node.target in BY_STRIDES:
            args[0] = self._as_traced(args[0])
        if node.target is torch.ops.aten.view_as_real.default:
            # Inverse transforms return lazy conjugates, of which their traces know nothing.
            args[0] = _Slot(self._call("aten.resolve_conj.default", self._slot(first_argument(node))))
        for k in range(count := IMAGES_IN_ONE_FORMAT.get(node.target, 0)):
            args[k] = self._in_order(args[k], _image_order(arguments_of(node)[count - 1].meta["val"]))
        for k in CONTIGUOUS.get(node.target, ()):
            args[k] = self._contiguous(args[k])
        for k in LAST_DIMENSION_CONTIGUOUS.get(node.target, ()):
            # A view of a contiguous value has the strides for which torch chose this kernel.
            if not base_of(args[k]).meta["val"].is_contiguous():
                args[k] = self._contiguous(args[k])
        return tuple(word_for(argument, self._word) for argument in args)

    def _word(self, value: Any) -> dict[str, int] | None:
        if isinstance(value, _Slot):
            return {SLOT: value.position}
        if isinstance(value, fx.Node):
            example = value.meta.get("val")
            if isinstance(example, torch.Tensor):
                return {SLOT: self._slot(value)}
            if not isinstance(example, _SIZES):
                kind = type(example).__name__
                raise TypeError(
                    f"an argument is {value.name}, a {kind}, but torch nodes support tensors and sizes only"
                )
            value = example
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return {SIZE: self._size_index(value)}
        if isinstance(value, torch.SymBool):
            raise TypeError("an argument is a boolean computed from sizes, which torch nodes don't support")
        return None

    def _large_results(self, node: fx.Node) -> tuple[LargeResult, ...]:
        value = node.meta.get("val")
        return tuple(
            LargeResult(k, tuple(word_for(size, self._word) for size in one.shape), one.dtype)
            for k, one in enumerate(value if isinstance(value, (tuple, list)) else (value,))
            if isinstance(one, torch.Tensor) and _is_large(one)
        )

    def _as_traced(self, node: fx.Node) -> _Slot:
        """Appends a copy of a value, if it hasn't the strides that AOTAutograd traced it with.

        Raises:
            ConvertError: the traced strides have gaps or an offset, or the value is a view of an input.
        """
        value = node.meta["val"]
        order = memory_order(value)
        if base_of(node).op == "placeholder" or order is None or value.storage_offset() != 0:
            raise ConvertError(
                f"the result of as_strided depends on the strides of {node.name}, which a session can change",
                remedy="Use reshape, permute or slices instead of as_strided.",
                operator="aten.as_strided",
            )
        return self._in_order(node, order)

    def _contiguous(self, value: Any) -> Any:
        is_tensor = isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor)
        return self._in_order(value, list(range(value.meta["val"].dim()))) if is_tensor else value

    def _in_order(self, node: fx.Node, order: list[int]) -> _Slot:
        """Appends a copy of a value whose dimensions have this order in memory, if it has another."""
        slot = self._slot(node)
        is_permuted = order != sorted(order)
        if is_permuted:
            slot = self._permuted(slot, order)
        slot = self._call("aten.contiguous.default", slot)
        return _Slot(self._permuted(slot, inverse_order(order)) if is_permuted else slot)

    def _permuted(self, slot: int, order: list[int]) -> int:
        return self._call("aten.permute.default", slot, order)

    def _call(self, target: str, slot: int, *args: Any) -> int:
        (result,) = slots = self._new_slots(1)
        self._statements.append((Statement(target, ({SLOT: slot}, *args), {}), slots))
        return result


def _image_order(images: torch.Tensor) -> list[int]:
    """The order of dimensions in memory that torch's kernels use for images: channels last if they have this format."""
    return channels_last(images.dim()) if has_channels_last(images) else list(range(images.dim()))


def _large_out(node: fx.Node) -> str | None:
    """The name of the out= overload of an operator with a large result; None if its result is allocated."""
    value, target = node.meta.get("val"), node.target
    assert isinstance(target, OpOverload)
    if target in OPERATORS or not isinstance(value, torch.Tensor) or not _is_large(value):
        return None
    out = out_overload(target)
    return None if out is None or not (is_pointwise(target) or target in _INTO_MEMORY) else overload_name(out)


def _allocates(node: fx.Node) -> bool:
    """Whether an operator is this project's, and allocates its results."""
    operator = OPERATORS.get(node.target) if isinstance(node.target, OpOverload) else None
    return operator is not None and operator.writes_into is None


def _is_large(value: torch.Tensor) -> bool:
    """Whether a result should use the pool's memory. If a size is dynamic, the pool decides at every run."""
    if not value.is_contiguous() or not is_cpu(value.device):
        return False
    if any(isinstance(size, torch.SymInt) for size in value.shape):
        return True
    return value.numel() * value.dtype.itemsize >= SMALL_BYTES


def _renumbered(statement: Statement, order: dict[int, int]) -> Statement:
    def renumbered(word: Any) -> Any:
        if isinstance(word, dict):
            return {SLOT: order[word[SLOT]]} if SLOT in word else word
        return [renumbered(part) for part in word] if isinstance(word, list) else word

    return dataclasses.replace(
        statement,
        args=tuple(renumbered(word) for word in statement.args),
        kwargs={name: renumbered(word) for name, word in statement.kwargs.items()},
    )
