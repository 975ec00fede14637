"""From an FX graph of ATen operators to values: pointwise expressions, reductions and library calls."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import is_of_backward
from lit_ort._compat.torch_fx import first_argument, is_read_by, is_view
from lit_ort._compat.torch_ops import SCATTERS, draws
from lit_ort._compat.torch_sizes import channels_last, has_channels_last, inverse_order, may_overlap
from lit_ort.regions.dropout_values import DROPOUT
from lit_ort.regions.element_types import computed_in, is_float, name_of, stored
from lit_ort.regions.index_expressions import INDEX_HANDLERS, OWN_INDEX_HANDLERS
from lit_ort.regions.losses import LOSSES
from lit_ort.regions.node_expressions import COPIES, HANDLERS, OWN_HANDLERS, Handler, is_copy, shape_of, size_of_node
from lit_ort.regions.normalizations import NORMALIZATIONS
from lit_ort.regions.pointwise_table import BY_OVERLOAD, CHOOSE, COMPARE, FLOAT, OPERATORS
from lit_ort.regions.region import LONG_SUM
from lit_ort.regions.resampling import RESAMPLING_HANDLERS, RESAMPLING_OPERATORS
from lit_ort.regions.row_operators import ROW_OPERATORS
from lit_ort.regions.strided_views import StridedView
from lit_ort.regions.symbolic_size import Number, Size, numbers_of, product
from lit_ort.regions.value_expressions import (
    Compute,
    Constant,
    Expression,
    NotRegional,
    Read,
    Value,
    broadcast_shape,
    converted,
    cost_of_expression,
    is_all,
    is_reading,
    order_of_elements,
    permuted,
    reads_of,
    viewed,
)

aten, prims = torch.ops.aten, torch.ops.prims

# An expression of at most this cost is computed again where it is used, if it reads no more than it has elements.
_CHEAP = 3
# A reduction of everything is cut into rows, which threads share, if it has more elements.
_LONG_ROW = 4096
# A sum of more terms is a long one.
_MOST_TERMS = 8192
# Operators that round a number to the 16-bit dtype of the others, as comparisons do; torch's other operators don't.
_ROUND_NUMBERS = frozenset({"add", "sub", "rsub", "remainder", "fmod", "pow", "atan2", "logaddexp", "xlogy"})
# The operators of images, which are faster with channels last.
_OF_IMAGES = (
    "aten.conv",
    "aten.max_pool",
    "aten.avg_pool",
    "aten._adaptive",
    "aten.upsample",
    "aten.native_group_norm",
)
_OF_IMAGES += ("aten._native_batch_norm", "aten.native_batch_norm", "lit_ort.in_memory_format", "lit_ort.image_")
_HANDLERS: dict[Any, Handler] = {**HANDLERS, **INDEX_HANDLERS, **RESAMPLING_HANDLERS}
_OWN_HANDLERS: dict[str, Handler] = {**OWN_HANDLERS, **OWN_INDEX_HANDLERS}
# Operators that are several values.
_SEVERAL: dict[Any, Callable[..., tuple[Expression | None, ...]]] = {
    **ROW_OPERATORS,
    **NORMALIZATIONS,
    **LOSSES,
    **RESAMPLING_OPERATORS,
}


@dataclass(eq=False)
class LibraryCall:
    """An FX node that is called as it is; its arguments are values, seen through views.

    Args:
        node: the node.
        arguments: what it reads.
        results: its results, by their positions.
        after: a result of a call that has to run before.
    """

    node: fx.Node
    arguments: dict[fx.Node, Read]
    results: dict[int | None, Value]
    after: Value | None = None

    def needs(self) -> list[Value]:
        read = [read.value for read in self.arguments.values() if read.value is not None]
        return list(dict.fromkeys(read if self.after is None else [*read, self.after]))


@dataclass(eq=False)
class GraphValues:
    """What a graph computes.

    Args:
        inputs: the value of each placeholder and attribute that is a tensor.
        steps: values and library calls in the order of the graph.
        outputs: for each output of the graph, what is read; None where the graph returns no tensor.
        known: the expression of each node that has one, or those of its results.
    """

    inputs: dict[fx.Node, Value] = field(default_factory=dict)
    steps: list[Value | LibraryCall] = field(default_factory=list)
    outputs: list[Read | None] = field(default_factory=list)
    known: dict[fx.Node, Any] = field(default_factory=dict)


def read_graph(graph: fx.Graph, copies_outputs: bool = False) -> GraphValues:
    """The values of a graph.

    Args:
        graph: a graph of ATen operators.
        copies_outputs: whether each output becomes a value of its own, even if it is a view.
    """
    return Reader(graph, copies_outputs).read()


def _late_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of the backward, and those that only it reads, such as recomputed ones."""
    late: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_of_backward(node) or (node.users and all(user in late for user in node.users)):
            late.add(node)
    return late


def _is_used(node: fx.Node, position: int) -> bool:
    """Whether one of a node's results is used; its only result is."""
    results = [user for user in node.users if user.target is operator.getitem]
    return not results or any(user.args[1] == position and user.users for user in results)


def _has_to_copy(node: fx.Node) -> bool:
    """Whether a node is a copy that is written to, of elements that share memory."""
    return node.target in COPIES and is_read_by(node, SCATTERS) and may_overlap(first_argument(node).meta["val"])


def _argument(arg: Any) -> Any:
    """An argument of an operator of several values, with a number of the trace's sizes as this number."""
    if isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), float | torch.SymFloat | torch.SymBool):
        raise NotRegional("a number that sizes tell")
    return size_of_node(arg)


def _require_shape(node: fx.Node, expression: Expression, value: torch.Tensor) -> None:
    """Refuses sizes that a trace knows to be equal but that are different polynomials."""
    if expression.shape != shape_of(value):
        assert any(isinstance(size, torch.SymInt) for size in value.shape), (node, expression.shape)
        raise NotRegional(f"{node.target} of sizes whose equality isn't seen")


class Reader:
    def __init__(self, graph: fx.Graph, copies_outputs: bool) -> None:
        self.graph, self.copies_outputs = graph, copies_outputs
        self.values = GraphValues()
        self.known = self.values.known
        self.is_backward = False
        self.late = _late_nodes(graph)
        # A result of the last call that draws from torch's random generator.
        self.drawn: Value | None = None
        # In other graphs, strides of channels last are those of any permuted value.
        self.has_images = any(str(node.target).startswith(_OF_IMAGES) for node in graph.nodes)

    def read(self) -> GraphValues:
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._placeholder(node)
            elif node.op == "output":
                self.values.outputs = [self._output(arg) for arg in node.args[0]]
            elif node.op == "call_function":
                self._call(node)
            else:
                raise NotRegional(f"{node.op} {node.target}")
        return self.values

    def _placeholder(self, node: fx.Node) -> None:
        tensor = node.meta.get("val")
        if isinstance(tensor, torch.Tensor):
            # Sessions pass contiguous values, whatever the strides of the trace.
            value = Value(node.name, shape_of(tensor), name_of(tensor.dtype) or str(tensor.dtype))
            self.values.inputs[node] = value
            self.known[node] = value.read()

    def _output(self, arg: Any) -> Read | None:
        if not isinstance(arg, fx.Node) or arg not in self.known:
            return None
        if self.copies_outputs:
            self.known[arg] = self._stored(arg, self.known[arg])
        return self.as_tensor(arg)

    def _call(self, node: fx.Node) -> None:
        self.is_backward = node in self.late
        if node.target is operator.getitem:
            results = self.known.get(node.args[0])  # type: ignore[arg-type]
            if isinstance(results, dict) and node.args[1] in results:
                self.known[node] = results[node.args[1]]
            return
        try:
            self.known[node] = self._regional(node)
        except NotRegional:
            self._library(node)

    def _regional(self, node: fx.Node) -> Expression | dict[int, Expression]:
        operator_of = _SEVERAL.get(node.target) or DROPOUT.get(str(node.target))  # type: ignore[call-overload]
        if operator_of is not None:
            return self._row_operator(node, operator_of)
        expression, value = self._expression(node), node.meta["val"]
        _require_shape(node, expression, value)
        if _has_to_copy(node):
            return self._stored(node, expression)
        return self._in_memory(node, expression, value)

    def _settled(self, node: fx.Node, expression: Expression) -> Expression:
        """An expression as a value of its own, unless it is cheap enough to be computed where it is used."""
        if isinstance(expression, Read | Constant):
            return expression
        shared = len(node.users) > 1 and cost_of_expression(expression) > 1
        tensors = sum(read.value is not None and 0 not in read.view.strides[-1:] for read in reads_of(expression))
        if cost_of_expression(expression) <= _CHEAP and not shared and tensors <= 1:
            return expression
        return self.value(node.name, expression).read()

    def value(self, name: str, expression: Expression) -> Value:
        value = Value(
            name, expression.shape, expression.dtype, "pointwise", expression, is_of_backward=self.is_backward
        )
        self.values.steps.append(value)
        return value

    def order_of(self, value: Any) -> list[int] | None:
        """The order of memory in which an operator leaves the dimensions of an image; None if it is theirs."""
        if self.has_images and isinstance(value, torch.Tensor) and has_channels_last(value):
            return channels_last(value.dim())
        return None

    def _stored(self, node: fx.Node, expression: Expression) -> Expression:
        """An expression as a value with the order of memory of a node's."""
        order = self.order_of(node.meta.get("val"))
        if order is None:
            return self.value(node.name, expression).read()
        return permuted(self.value(node.name, permuted(expression, order)).read(), inverse_order(order))

    def _is_stored(self, node: fx.Node) -> bool:
        """Whether a node's value is all elements of a value in their order of memory."""
        order, known = self.order_of(node.meta.get("val")), self.known[node]
        return is_all(known) or (order is not None and order_of_elements(known) == order)

    def as_read(self, expression: Expression, name: str) -> Read:
        if isinstance(expression, Read) and expression.value is not None and expression.mask is None:
            return expression
        return self.value(name, expression).read()

    def as_tensor(self, node: fx.Node) -> Read:
        """A node's value as one that torch's views make of a value: by the nodes of which it is a view."""
        chain = [node]
        while not self._is_stored(chain[-1]) and (is_view(chain[-1]) or is_copy(chain[-1])):
            base = chain[-1].args[0]
            if not isinstance(base, fx.Node) or isinstance(self.known.get(base), dict | None):
                break
            chain.append(base)
        base = chain.pop()
        if not self._is_stored(base):
            # What it is a view of becomes a value, so that torch makes the views of it.
            self.known[base] = self._stored(base, self.known[base])
            for view in reversed(chain):
                self.known[view] = self._regional(view)
        elif not isinstance(known := self.known[node], Read) or known.value is not self.known[base].value:
            self.known[node] = self._stored(node, known)
        return self.known[node]

    def _library(self, node: fx.Node) -> None:
        arguments = {
            arg: self.as_tensor(arg)
            for arg in node.all_input_nodes
            if arg in self.known and not isinstance(self.known[arg], dict)
        }
        result = node.meta.get("val")
        parts = dict(enumerate(result)) if isinstance(result, tuple | list) else {None: result}
        results: dict[int | None, Value] = {}
        for position, part in parts.items():
            if isinstance(part, torch.Tensor):
                value = Value(node.name, shape_of(part), name_of(part.dtype) or str(part.dtype))
                if not may_overlap(part):
                    value.view = StridedView(shape_of(part), numbers_of(part.stride()), 0)
                results[position] = value
        call = LibraryCall(node, arguments, results)
        if draws(node):
            # Samples are those of eager if the generator is used in the same order.
            call.after, self.drawn = self.drawn, next(iter(results.values()), self.drawn)
        self.values.steps.append(call)
        reads = {position: value.read() for position, value in results.items()}
        self.known[node] = reads[None] if None in reads else reads

    def _row_operator(
        self, node: fx.Node, operator_of: Callable[..., tuple[Expression | None, ...]]
    ) -> Expression | dict[int, Expression]:
        """The results of an operator that is several values; a dict if there are several of them."""
        result = node.meta.get("val")
        parts = result if isinstance(result, tuple | list) else (result,)
        for position, part in enumerate(parts):
            is_empty = not isinstance(part, torch.Tensor) or product(shape_of(part)) == 0
            if part is not None and is_empty and _is_used(node, position):
                raise NotRegional(str(node.target))
        arguments, settings = map(_argument, node.args), {name: _argument(arg) for name, arg in node.kwargs.items()}
        expressions = operator_of(Terms(self, node), *arguments, **settings)
        known = {}
        for position, (expression, part) in enumerate(zip(expressions, parts, strict=True)):
            if expression is not None and part is not None:
                _require_shape(node, expression, part)
                known[position] = self._in_memory(node, expression, part)
        return known if isinstance(result, tuple | list) else known[0]

    def _in_memory(self, node: fx.Node, expression: Expression, value: torch.Tensor) -> Expression:
        """An expression of a value of this dtype and order of memory."""
        expression, order = converted(expression, name_of(value.dtype) or ""), self.order_of(value)
        if order is None or is_view(node):
            return self._settled(node, expression)
        stored = self._settled(node, permuted(expression, order))
        if is_copy(node) and not is_all(stored):
            stored = self.value(node.name, stored).read()
        return permuted(stored, inverse_order(order))

    # Expressions of nodes.

    def _expression(self, node: fx.Node) -> Expression:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or name_of(value.dtype) is None:
            raise NotRegional(str(node.target))
        if product(shape_of(value)) == 0 or value.device.type != "cpu":
            raise NotRegional("no elements, or another device")
        handler = _HANDLERS.get(node.target) or _OWN_HANDLERS.get(str(node.target))  # type: ignore[call-overload]
        if handler is not None:
            return handler(self, node, value)
        name = str(node.target).removeprefix("aten.")
        if name not in BY_OVERLOAD or node.kwargs:
            raise NotRegional(str(node.target))
        return self.compute(BY_OVERLOAD[name].name, value, *node.args)

    def argument(self, arg: Any, shape: Sequence[Number], dtype: str) -> Expression:
        """An argument of a node in a shape and a dtype."""
        arg = size_of_node(arg)
        if not isinstance(arg, fx.Node):
            if isinstance(arg, bool | int | float | Size):
                return Constant(arg, tuple(shape), dtype)
            raise NotRegional(f"argument {arg!r}")
        return self.cast(self.broadcast(self.of(arg), shape), dtype)

    def argument_in_memory(self, arg: Any, shape: Sequence[Number], dtype: str) -> Expression:
        """An argument with the values that it has in memory: of 16-bit floats, numbers are rounded."""
        expression = self.argument(arg, shape, dtype)
        if computed_in(dtype) == dtype:
            return expression
        if isinstance(expression, Constant):
            return replace(expression, number=stored(expression.number, dtype))
        return converted(expression, dtype)

    def of(self, arg: Any) -> Expression:
        known = self.known.get(arg) if isinstance(arg, fx.Node) else None
        if known is None or isinstance(known, dict) or 0 in known.shape:
            raise NotRegional(f"argument {arg!r}")
        if name_of(arg.meta["val"].dtype) is None:
            raise NotRegional(f"{arg.meta['val'].dtype}")
        return known

    def broadcast(self, expression: Expression, shape: Sequence[Number]) -> Expression:
        return expression if expression.shape == tuple(shape) else viewed(expression, lambda view: view.expand(shape))

    def cast(self, expression: Expression, dtype: str) -> Expression:
        if computed_in(expression.dtype) == computed_in(dtype):
            return expression
        if isinstance(expression, Constant):
            return replace(expression, dtype=dtype)
        return Compute("cast", (expression,), expression.shape, dtype)

    def compute(self, name: str, value: torch.Tensor, *args: Any) -> Expression:
        """An operator of the table on arguments of a node, broadcast and cast."""
        rule, dtype = OPERATORS[name].rule, name_of(value.dtype) or ""
        common = self._common(args) if rule == COMPARE else dtype
        argument = self.argument_in_memory if rule == COMPARE or name in _ROUND_NUMBERS else self.argument
        if rule == FLOAT and not is_float(dtype):
            raise NotRegional(f"{name} of {dtype}")
        dtypes = ["bool" if rule == CHOOSE and not position else common for position in range(len(args))]
        arguments = tuple(argument(arg, shape_of(value), kind) for arg, kind in zip(args, dtypes, strict=True))
        if len(arguments) != OPERATORS[name].formula.__code__.co_argcount:
            raise NotRegional(f"{name} of {len(arguments)} arguments")
        return Compute(name, arguments, shape_of(value), dtype)

    def _common(self, args: Sequence[Any]) -> str:
        metas = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        dtype = torch.result_type(*metas) if len(metas) > 1 else metas[0].dtype
        return name_of(dtype) or ""

    def reduction(
        self,
        name: str,
        kind: str,
        expression: Expression,
        axes: Sequence[int],
        keep: bool,
        precise: bool = True,
    ) -> Expression:
        """A reduction over axes as a value; with more rounding errors in a long sum unless it is to be precise."""
        rank = len(expression.shape)
        # A scalar can be reduced over the axis 0 or -1, which it doesn't have.
        axes = tuple(sorted(axis % rank for axis in axes)) if axes and rank else tuple(range(rank))
        kept = tuple(1 if axis in axes else size for axis, size in enumerate(expression.shape))
        # Axes of one element are no part of the iteration space.
        long = [axis for axis in range(rank) if expression.shape[axis] != 1]
        reduced = tuple(at for at, axis in enumerate(long) if axis in axes)
        result = viewed(expression, lambda view: view.drop([axis for axis in range(rank) if axis not in long]))
        factors = _factors(product(result.shape)) if kind == "sum" and len(long) == len(reduced) == 1 else None
        if factors is not None:
            result = viewed(result, lambda view: view.reshape(factors) or view)
            long, reduced = [0, 1], (0, 1)
        if len(reduced) == len(long) > 1 and product(expression.shape) > _LONG_ROW:
            # First each row, then all rows, so that threads share the rows. Only the whole is rounded to 16 bits.
            rows = self._reduced(name, kind, converted(result, computed_in(expression.dtype)), reduced[-1:])
            result = converted(self._reduced(name, kind, rows, reduced), expression.dtype)
        elif reduced:
            result = self._reduced(name, kind, result, reduced, precise)
        result = viewed(result, lambda view: view.reshape(kept) or view)
        return result if keep else viewed(result, lambda view: view.drop(axes))

    def _reduced(
        self, name: str, kind: str, expression: Expression, axes: tuple[int, ...], precise: bool = True
    ) -> Read:
        rank = len(expression.shape)
        leading, trailing = tuple(range(len(axes))), tuple(range(rank - len(axes), rank))
        if axes not in (trailing, leading):
            kept = [axis for axis in range(rank) if axis not in axes]
            # Rows are what stays, unless its elements are adjacent in memory, as channels that are last.
            is_leading = any(
                read.value is not None and read.view.strides[kept[-1]] == 1 for read in reads_of(expression)
            )
            order = [*axes, *kept] if is_leading else [*kept, *axes]
            expression = permuted(expression, order)
            axes = leading if is_leading else trailing
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(expression.shape))
        if precise and kind == "sum" and computed_in(expression.dtype) == "float32":
            kind = LONG_SUM if product(expression.shape[axis] for axis in axes) > _MOST_TERMS else kind
        value = Value(name, shape, expression.dtype, kind, expression, axes, self.is_backward)
        self.values.steps.append(value)
        return value.read()


def _factors(size: Number) -> tuple[int, int] | None:
    """Two sizes whose product is a large one and that are close to each other, for rows; None if there are none."""
    if not isinstance(size, int) or size <= _LONG_ROW:
        return None
    first = next((k for k in range(math.isqrt(size), 15, -1) if size % k == 0), None)
    return None if first is None else (first, size // first)


class Terms:
    """Makes the expressions of a row operator."""

    def __init__(self, reader: Reader, node: fx.Node) -> None:
        self.reader, self.node = reader, node

    def given(self, arg: Any, dtype: str | None = None) -> Expression:
        expression = self.reader.of(arg)
        if not is_float(expression.dtype):
            raise NotRegional(f"{self.node.target} of {expression.dtype}")
        return converted(expression, computed_in(expression.dtype) if dtype is None else dtype)

    def apply(self, name: str, *args: Expression | float | Number) -> Expression:
        """A pointwise operator on expressions and numbers, as a value."""
        expression = self.computed_again(name, *args)
        return self.reader.value(self.node.name, expression).read() if is_reading(expression) else expression

    def computed_again(self, name: str, *args: Expression | float | Number) -> Expression:
        """The same as an expression that is computed wherever it is used."""
        terms = [arg for arg in args if not isinstance(arg, float | int | Size)]
        shape = broadcast_shape(term.shape for term in terms)
        dtype = max((computed_in(term.dtype) for term in terms), key=lambda name: int(name.removeprefix("float")))
        given = tuple(
            Constant(arg, shape, dtype)
            if isinstance(arg, float | int | Size)
            else self.reader.broadcast(converted(arg, dtype), shape)
            for arg in args
        )
        return Compute(name, given, shape, dtype)

    def reduce(self, kind: str, x: Expression, axes: Sequence[int]) -> Expression:
        axes = list(axes)
        return self.reader.reduction(self.node.name, kind, x, axes, True) if axes else x

    def row_total(self, x: Expression, axis: int) -> Expression:
        """A sum as torch's softmax has it: not precise, which takes a tenth more time in rows of 50,000 elements."""
        return self.reader.reduction(self.node.name, "sum", x, [axis], True, precise=False)

    def squeezed(self, x: Expression, axes: Sequence[int]) -> Expression:
        return viewed(x, lambda view: view.drop(list(axes)))
