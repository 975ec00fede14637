"""From an FX graph of ATen operators to values: pointwise expressions, reductions and library calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import is_of_backward
from lit_ort._compat.torch_fx import is_view
from lit_ort._compat.torch_sizes import may_overlap
from lit_ort.regions.element_types import computed_in, is_float, name_of
from lit_ort.regions.pointwise_table import BY_OVERLOAD, CHOOSE, COMPARE, FLOAT, OPERATORS
from lit_ort.regions.row_operators import ROW_OPERATORS
from lit_ort.regions.strided_views import StridedView
from lit_ort.regions.symbolic_size import Number, Size, number_of, numbers_of, product, quotient
from lit_ort.regions.value_expressions import (
    Compute,
    Constant,
    Expression,
    NotRegional,
    Read,
    Take,
    Value,
    cost_of_expression,
    reads_of,
    shifted,
    viewed,
)

aten, prims = torch.ops.aten, torch.ops.prims

# An expression of at most this cost is computed again where it is used, if it reads no more than it has elements.
_CHEAP = 3
# The seed with which lit_ort's operators apply no dropout (lit_ort/runtime/random.py).
_DROPOUT_OFF = -1
# A sum of everything is cut into rows if it has more elements.
_LONG_ROW = 4096
# A concatenation of more parts is the library's: each point compares its index with all of them.
_MOST_PARTS = 4


@dataclass(eq=False)
class LibraryCall:
    """An FX node that is called as it is; its arguments are values, seen through views."""

    node: fx.Node
    arguments: dict[fx.Node, Read]
    results: dict[int | None, Value]

    def needs(self) -> list[Value]:
        return list(dict.fromkeys(read.value for read in self.arguments.values() if read.value is not None))


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


def read_graph(graph: fx.Graph) -> GraphValues:
    """The values of a graph."""
    return _Reader(graph).read()


def _shape(tensor: torch.Tensor) -> tuple[Number, ...]:
    return numbers_of(tensor.shape)


def _is_channels_last(value: torch.Tensor) -> bool:
    if value.is_contiguous() or value.dim() not in (4, 5):
        return False
    return value.is_contiguous(memory_format=torch.channels_last if value.dim() == 4 else torch.channels_last_3d)


def _late_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of the backward, and those that only it reads, such as recomputed ones."""
    late: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_of_backward(node) or (node.users and all(user in late for user in node.users)):
            late.add(node)
    return late


def is_all(expression: Any) -> bool:
    """Whether an expression is all elements of a value in their order."""
    if not isinstance(expression, Read) or expression.value is None or expression.mask is not None:
        return False
    own, view = expression.value.view, expression.view
    return view == own or (view.is_whole and own.is_whole and view.size == own.size)


class _Reader:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.values = GraphValues()
        self.known = self.values.known
        self.is_backward = False
        self.late = _late_nodes(graph)

    def read(self) -> GraphValues:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
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
            value = Value(node.name, _shape(tensor), name_of(tensor.dtype) or str(tensor.dtype))
            self.values.inputs[node] = value
            self.known[node] = value.read()

    def _output(self, arg: Any) -> Read | None:
        if not isinstance(arg, fx.Node) or arg not in self.known:
            return None
        return self._as_tensor(arg)

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
        operator_of = _SEVERAL.get(node.target) or _OF_LIT_ORT.get(str(node.target))  # type: ignore[call-overload]
        if operator_of is not None:
            return self._row_operator(node, operator_of)
        expression, value = self._expression(node), node.meta["val"]
        if expression.shape != _shape(value):
            # Sizes that a trace knows to be equal can be different polynomials.
            assert any(isinstance(size, torch.SymInt) for size in value.shape), (node, expression.shape)
            raise NotRegional(f"{node.target} of sizes whose equality isn't seen")
        return self._in_memory(node, expression, name_of(value.dtype) or "")

    def _settled(self, node: fx.Node, expression: Expression) -> Expression:
        """An expression as a value of its own, unless it is cheap enough to be computed where it is used."""
        if isinstance(expression, Read | Constant):
            return expression
        shared = len(node.users) > 1 and cost_of_expression(expression) > 1
        tensors = sum(read.value is not None and 0 not in read.view.strides[-1:] for read in reads_of(expression))
        if cost_of_expression(expression) <= _CHEAP and not shared and tensors <= 1:
            return expression
        return self._value(node.name, expression).read()

    def _value(self, name: str, expression: Expression) -> Value:
        value = Value(
            name, expression.shape, expression.dtype, "pointwise", expression, is_of_backward=self.is_backward
        )
        self.values.steps.append(value)
        return value

    def _as_read(self, expression: Expression, name: str) -> Read:
        if isinstance(expression, Read) and expression.value is not None and expression.mask is None:
            return expression
        return self._value(name, expression).read()

    def _as_tensor(self, node: fx.Node) -> Read:
        """A node's value as one that torch's views make of a value: by the nodes of which it is a view."""
        chain = [node]
        while not is_all(self.known[chain[-1]]) and (is_view(chain[-1]) or chain[-1].target in _COPIES):
            base = chain[-1].args[0]
            if not isinstance(base, fx.Node) or isinstance(self.known.get(base), dict | None):
                break
            chain.append(base)
        base = chain.pop()
        if not is_all(self.known[base]):
            # What it is a view of becomes a value, so that torch makes the views of it.
            self.known[base] = self._value(base.name, self.known[base]).read()
            for view in reversed(chain):
                self.known[view] = self._regional(view)
        elif not isinstance(known := self.known[node], Read) or known.value is not self.known[base].value:
            self.known[node] = self._value(node.name, known).read()
        return self.known[node]

    def _library(self, node: fx.Node) -> None:
        arguments = {
            arg: self._as_tensor(arg)
            for arg in node.all_input_nodes
            if arg in self.known and not isinstance(self.known[arg], dict)
        }
        result = node.meta.get("val")
        parts = dict(enumerate(result)) if isinstance(result, tuple | list) else {None: result}
        results: dict[int | None, Value] = {}
        for position, part in parts.items():
            if isinstance(part, torch.Tensor):
                value = Value(node.name, _shape(part), name_of(part.dtype) or str(part.dtype))
                if not may_overlap(part):
                    value.view = StridedView(_shape(part), numbers_of(part.stride()), 0)
                results[position] = value
        self.values.steps.append(LibraryCall(node, arguments, results))
        reads = {position: value.read() for position, value in results.items()}
        self.known[node] = reads[None] if None in reads else reads

    def _row_operator(
        self, node: fx.Node, operator_of: Callable[..., tuple[Expression | None, ...]]
    ) -> Expression | dict[int, Expression]:
        """The results of an operator that is several values; a dict if there are several of them."""
        result = node.meta.get("val")
        parts = result if isinstance(result, tuple | list) else (result,)
        for part in parts:
            if part is not None and (not isinstance(part, torch.Tensor) or product(_shape(part)) == 0):
                raise NotRegional(str(node.target))
        expressions = operator_of(_Terms(self, node), *node.args, **node.kwargs)
        known = {}
        for position, (expression, part) in enumerate(zip(expressions, parts, strict=True)):
            if expression is not None and part is not None:
                known[position] = self._in_memory(node, expression, name_of(part.dtype) or "")
        return known if isinstance(result, tuple | list) else known[0]

    def _in_memory(self, node: fx.Node, expression: Expression, dtype: str) -> Expression:
        if expression.dtype != dtype:
            expression = Compute("cast", (expression,), expression.shape, dtype)
        return self._settled(node, expression)

    # Expressions of nodes.

    def _expression(self, node: fx.Node) -> Expression:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or name_of(value.dtype) is None:
            raise NotRegional(str(node.target))
        if product(_shape(value)) == 0 or value.device.type != "cpu":
            raise NotRegional("no elements, or another device")
        if _is_channels_last(value):
            raise NotRegional("images with channels last")
        handler = _HANDLERS.get(node.target)  # type: ignore[call-overload]
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
        if rule == FLOAT and not is_float(dtype):
            raise NotRegional(f"{name} of {dtype}")
        dtypes = ["bool" if rule == CHOOSE and not position else common for position in range(len(args))]
        arguments = tuple(self.argument(arg, _shape(value), kind) for arg, kind in zip(args, dtypes, strict=True))
        if len(arguments) != OPERATORS[name].formula.__code__.co_argcount:
            raise NotRegional(f"{name} of {len(arguments)} arguments")
        return Compute(name, arguments, _shape(value), dtype)

    def _common(self, args: Sequence[Any]) -> str:
        metas = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        dtype = torch.result_type(*metas) if len(metas) > 1 else metas[0].dtype
        return name_of(dtype) or ""

    def reduction(self, name: str, kind: str, expression: Expression, axes: Sequence[int], keep: bool) -> Expression:
        """A reduction over axes as a value."""
        rank = len(expression.shape)
        axes = tuple(sorted(axis % rank for axis in axes)) if axes else tuple(range(rank))
        kept = tuple(1 if axis in axes else size for axis, size in enumerate(expression.shape))
        if all(expression.shape[axis] == 1 for axis in axes):
            result = expression
        elif len(axes) == rank > 1 and product(expression.shape) > _LONG_ROW:
            # First each row, then all rows, so that threads share the rows.
            rows = self._reduced(name, kind, expression, (rank - 1,))
            result = self._reduced(name, kind, rows, tuple(range(rank)))
        else:
            result = self._reduced(name, kind, expression, axes)
        result = viewed(result, lambda view: view.reshape(kept) or view)
        return result if keep else viewed(result, lambda view: view.drop(axes))

    def _reduced(self, name: str, kind: str, expression: Expression, axes: tuple[int, ...]) -> Read:
        rank = len(expression.shape)
        if axes not in (tuple(range(rank - len(axes), rank)), tuple(range(len(axes)))):
            # Rows are what stays.
            order = [axis for axis in range(rank) if axis not in axes] + list(axes)
            expression = viewed(expression, lambda view: view.permute(order))
            axes = tuple(range(rank - len(axes), rank))
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(expression.shape))
        value = Value(name, shape, expression.dtype, kind, expression, axes, self.is_backward)
        self.values.steps.append(value)
        return value.read()


class _Terms:
    """Makes the expressions of a row operator."""

    def __init__(self, reader: _Reader, node: fx.Node) -> None:
        self.reader, self.node = reader, node

    def given(self, arg: Any, dtype: str | None = None) -> Expression:
        expression = self.reader.of(arg)
        if not is_float(expression.dtype):
            raise NotRegional(f"{self.node.target} of {expression.dtype}")
        return self.to(expression, computed_in(expression.dtype) if dtype is None else dtype)

    def to(self, x: Expression, dtype: str) -> Expression:
        return x if x.dtype == dtype else Compute("cast", (x,), x.shape, dtype)

    def apply(self, name: str, *args: Expression | float | Number) -> Expression:
        terms = [arg for arg in args if not isinstance(arg, float | int | Size)]
        shape = _broadcast(term.shape for term in terms)
        dtype = max((computed_in(term.dtype) for term in terms), key=lambda name: int(name.removeprefix("float")))
        given = tuple(
            Constant(arg, shape, dtype)
            if isinstance(arg, float | int | Size)
            else self.reader.broadcast(self.to(arg, dtype), shape)
            for arg in args
        )
        return self.reader._value(self.node.name, Compute(name, given, shape, dtype)).read()

    def reduce(self, kind: str, x: Expression, axes: Sequence[int]) -> Expression:
        axes = list(axes)
        return self.reader.reduction(self.node.name, kind, x, axes, True) if axes else x

    def squeezed(self, x: Expression, axes: Sequence[int]) -> Expression:
        return viewed(x, lambda view: view.drop(list(axes)))


def _broadcast(shapes: Iterable[tuple[Number, ...]]) -> tuple[Number, ...]:
    """The common shape of shapes that broadcast."""
    known = list(shapes)
    rank = max(map(len, known))
    padded = [(1,) * (rank - len(shape)) + shape for shape in known]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def size_of_node(arg: Any) -> Any:
    """A node that is a number of the trace's sizes as this number; everything else as it is."""
    value = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    return number_of(value) if isinstance(value, int | torch.SymInt) else arg


# Copies, which are the same value.
_COPIES = frozenset({aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default})

Handler = Callable[[_Reader, fx.Node, torch.Tensor], Expression]


def _view(make: Callable[..., StridedView | None]) -> Handler:
    """The handler of a view operator: `make` of a view and the node's other arguments; None if it is no view."""

    def handler(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        return _seen(reader, node, lambda view: make(view, *map(size_of_node, node.args[1:]), **node.kwargs))

    return handler


def _seen(reader: _Reader, node: fx.Node, make: Callable[[StridedView], StridedView | None]) -> Expression:
    """A view of a node's first argument."""

    def view(given: StridedView) -> StridedView:
        made = make(given)
        if made is None:
            raise NotRegional("a reshape that is no view")
        return made

    source = reader.of(node.args[0])
    try:
        return viewed(source, view)
    except NotRegional:
        # The same view of the value itself.
        return viewed(reader._value(node.name, source).read(), view)


def _shaped(make: Callable[[StridedView, Sequence[Number]], StridedView | None]) -> Handler:
    """The handler of a view operator whose argument is the shape of the result."""

    def handler(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        return _seen(reader, node, lambda view: make(view, _shape(value)))

    return handler


def _as_strided(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    """A view of memory, if the memory is that of the trace; that of an input can be part of a larger one."""
    source, known = node.args[0], reader.of(node.args[0])
    assert isinstance(source, fx.Node)
    if not is_all(known) or known.value in reader.values.inputs.values():  # type: ignore[union-attr]
        raise NotRegional("memory that isn't a value's own")
    traced = source.meta["val"]
    layout = StridedView(_shape(traced), numbers_of(traced.stride()), number_of(traced.storage_offset()))
    if layout.offset != 0 or layout.merged() != known.value.view.merged():  # type: ignore[union-attr]
        raise NotRegional("memory of another layout than that of the trace")
    offset = size_of_node(node.args[3]) if len(node.args) > 3 else None
    return replace(known, view=StridedView(_shape(value), numbers_of(value.stride()), 0 if offset is None else offset))


def _slice(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    given: tuple[Any, ...] = (*map(size_of_node, node.args[1:]), *(0, None, None, 1)[len(node.args) - 1 :])
    axis, start, step = given[0] % value.dim(), given[1], given[3]
    size, whole = _shape(value)[axis], reader.of(node.args[0]).shape[axis]
    return _seen(reader, node, lambda view: view.narrow(axis, _first(start, whole), size, step))


def _first(start: Number | None, size: Number) -> Number:
    """The first element of a slice, whose start is cut to the elements that there are."""
    if start is None:
        return 0
    if isinstance(start, int) and isinstance(size, int):
        return range(size)[start:].start
    return start


def _transpose(view: StridedView, first: int, second: int) -> StridedView:
    order = list(range(len(view.shape)))
    order[first], order[second] = order[second], order[first]
    return view.permute(order)


def _squeeze(view: StridedView, axes: int | Sequence[int] | None = None) -> StridedView:
    every = range(len(view.shape)) if axes is None else [axes] if isinstance(axes, int) else axes
    return view.drop(list(every)) if view.shape else view


def _same(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    return reader.of(node.args[0])


def _to(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    source, dtype = reader.of(node.args[0]), name_of(value.dtype) or ""
    if source.dtype == dtype:
        return source
    return Compute("cast", (source,), source.shape, dtype)


def _constant(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    name = str(node.target)
    position = 0 if "scalar_tensor" in name else 2 if "new_full" in name else 1
    number: Any = 0 if "zeros" in name else 1 if "ones" in name else size_of_node(node.args[position])
    if not isinstance(number, float | int | Size):
        raise NotRegional(name)
    return Constant(number, _shape(value), name_of(value.dtype) or "")


def _arange(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    if "iota" in str(node.target):
        start, step = node.kwargs["start"], node.kwargs["step"]
    else:
        start, step = (0, 1) if len(node.args) == 1 else (node.args[0], node.args[2] if len(node.args) > 2 else 1)
    start, step = size_of_node(start), size_of_node(step)
    if not isinstance(start, int | Size) or not isinstance(step, int | Size):
        raise NotRegional(str(node.target))
    numbers = Read(None, StridedView(_shape(value), (step,), start), "int64")
    return reader.cast(numbers, name_of(value.dtype) or "")


def _named(name: str, *defaults: Any) -> Handler:
    """The handler of an operator of the table whose last arguments have defaults."""

    def handler(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        if node.kwargs:
            raise NotRegional(f"{node.target} with {node.kwargs}")
        missing = len(node.args) - OPERATORS[name].formula.__code__.co_argcount
        return reader.compute(name, value, *node.args, *defaults[missing:] if missing < 0 else ())

    return handler


def _gelu(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    tanh = "_tanh" if node.kwargs.get("approximate", "none") == "tanh" else ""
    backward = "_backward" if "backward" in str(node.target) else ""
    return reader.compute(f"gelu{tanh}{backward}", value, *node.args)


def _scaled(name: str) -> Handler:
    """add and sub, with their alpha."""

    def handler(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        dtype = name_of(value.dtype) or ""
        left, right = (reader.argument(arg, _shape(value), dtype) for arg in node.args)
        alpha: Any = node.kwargs.get("alpha", 1)
        if alpha != 1:
            right = Compute("mul", (right, Constant(alpha, right.shape, dtype)), right.shape, dtype)
        return Compute(name, (left, right), _shape(value), dtype)

    return handler


def _clamp(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    low, high = (*node.args[1:], None)[:2]
    if low is None:
        return reader.compute("minimum", value, node.args[0], high)
    name, limits = ("maximum", (low,)) if high is None else ("clamp", (low, high))
    return reader.compute(name, value, node.args[0], *limits)


def _pow(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    exponent, dtype = node.args[1], name_of(value.dtype) or ""
    shape = _shape(value)
    base = reader.argument(node.args[0], shape, dtype)
    if exponent in (2, 3):
        square = Compute("mul", (base, base), shape, dtype)
        return square if exponent == 2 else Compute("mul", (square, base), shape, dtype)
    if exponent == 1:
        return base
    simple = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in simple and is_float(dtype):
        return Compute(simple[exponent], (base,), shape, dtype)  # type: ignore[index]
    return reader.compute("pow", value, *node.args)


def _reduce(kind: str) -> Handler:
    def handler(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
        given, keep = (*node.args[1:], None, False)[:2] if len(node.args) != 2 else (node.args[1], False)
        axes = [given] if isinstance(given, int) else [a for a in given or () if isinstance(a, int)]  # type: ignore[union-attr]
        dtype = name_of(value.dtype) or ""
        source = reader.of(node.args[0])
        dtype = "bool" if kind in ("any", "all") else dtype
        expression = source if source.dtype == dtype else Compute("cast", (source,), source.shape, dtype)
        keep = bool(node.kwargs.get("keepdim", keep))
        if kind != "mean":
            return reader.reduction(node.name, kind, expression, axes, keep)
        total = reader.reduction(node.name, "sum", expression, axes, keep)
        count = quotient(product(expression.shape), product(total.shape))
        return Compute("div", (total, Constant(count, total.shape, dtype)), total.shape, dtype)

    return handler


def _along(shape: Sequence[Number], axis: int) -> Expression:
    """The index along an axis."""
    return Read(None, StridedView(tuple(shape), tuple(int(at == axis) for at in range(len(shape)))), "int64")


def _between(shape: Sequence[Number], axis: int, start: Number, end: Number) -> Expression:
    """Whether the index along an axis is from `start` to below `end`."""
    index, shape = _along(shape, axis), tuple(shape)
    low = Compute("ge", (index, Constant(start, shape, "int64")), shape, "bool")
    high = Compute("lt", (index, Constant(end, shape, "int64")), shape, "bool")
    if start == 0:
        return high
    return low if end == shape[axis] else Compute("logical_and", (low, high), shape, "bool")


def _placed(reader: _Reader, node: fx.Node, part: Expression, axis: int, start: Number, base: Expression) -> Expression:
    """`base` with a part in place of its elements from `start` on along an axis."""
    size = part.shape[axis]
    if size == base.shape[axis]:
        return part
    inside = _between(base.shape, axis, start, start + size)
    moved = shifted(part, axis, start, base.shape[axis], inside)
    if moved is None:
        moved = shifted(reader._value(node.name, part).read(), axis, start, base.shape[axis], inside)
        assert moved is not None
    return Compute("where", (inside, moved, base), base.shape, base.dtype)


def _cat(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    axis = int(node.args[1] if len(node.args) > 1 else 0) % value.dim()  # type: ignore[arg-type]
    if len(parts) > _MOST_PARTS or any(part.meta["val"].dim() != value.dim() for part in parts):  # type: ignore[union-attr]
        raise NotRegional("cat of many parts, or of empty ones")
    dtype = name_of(value.dtype) or ""
    start: Number = 0
    result: Expression = Constant(0, _shape(value), dtype)
    for part in parts:
        expression = reader.cast(reader.of(part), dtype)
        result = _placed(reader, node, expression, axis, start, result)
        start = start + expression.shape[axis]
    return result


def _padded(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    dtype = name_of(value.dtype) or ""
    result, pads = reader.of(node.args[0]), node.args[1]
    fill: Any = node.args[2] if len(node.args) > 2 else 0
    assert isinstance(pads, list | tuple)
    for at in range(len(pads) // 2):
        low, high = pads[2 * at : 2 * at + 2]
        if not isinstance(low, int) or not isinstance(high, int):
            raise NotRegional("pads that are sizes")
        axis = value.dim() - 1 - at
        start = max(low, 0)
        if low < 0 or high < 0:
            first, size = max(-low, 0), result.shape[axis] + min(low, 0) + min(high, 0)
            result = viewed(result, lambda view, axis=axis, first=first, size=size: view.narrow(axis, first, size))
        shape = (*result.shape[:axis], _shape(value)[axis], *result.shape[axis + 1 :])
        result = _placed(reader, node, result, axis, start, Constant(fill, shape, dtype))
    return result


def _split(terms: _Terms, x: Any, sizes: Any, axis: int = 0) -> tuple[Expression, ...]:
    source = terms.reader.of(x)
    axis %= len(source.shape)
    parts: list[Expression] = []
    start: Number = 0
    for part in terms.node.meta["val"]:
        size = _shape(part)[axis]
        parts.append(viewed(source, lambda view, start=start, size=size: view.narrow(axis, start, size)))
        start = start + size
    return tuple(parts)


def _unbind(terms: _Terms, x: Any, axis: int = 0) -> tuple[Expression, ...]:
    source = terms.reader.of(x)
    count = len(terms.node.meta["val"])
    return tuple(viewed(source, lambda view, at=at: view.select(axis, at)) for at in range(count))


def _embedding(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    table = reader._as_read(reader.of(node.args[0]), node.name)
    assert table.value is not None
    shape = _shape(value)
    index = viewed(reader.argument(node.args[1], shape[:-1], "int64"), lambda view: view.insert(-1))
    index = reader.broadcast(index, shape)
    strides = (*(0,) * (value.dim() - 1), table.view.strides[1])
    view = StridedView(shape, strides, table.view.offset)
    return Take(table.value, view, index, table.view.strides[0], table.shape[0], table.dtype)


def _gather(reader: _Reader, node: fx.Node, value: torch.Tensor) -> Expression:
    source = reader._as_read(reader.of(node.args[0]), node.name)
    axis = node.args[1]
    if not isinstance(axis, int) or not value.dim():
        raise NotRegional("gather")
    axis %= value.dim()
    assert source.value is not None
    index = reader.argument(node.args[2], _shape(value), "int64")
    strides = tuple(0 if other == axis else stride for other, stride in enumerate(source.view.strides))
    view = StridedView(_shape(value), strides, source.view.offset)
    return Take(source.value, view, index, source.view.strides[axis], source.shape[axis], source.dtype)


_HANDLERS: dict[Any, Handler] = {
    aten.view.default: _shaped(StridedView.reshape),
    aten._unsafe_view.default: _shaped(StridedView.reshape),
    aten.reshape.default: _shaped(StridedView.reshape),
    aten.permute.default: _view(StridedView.permute),
    aten.transpose.int: _view(_transpose),
    aten.t.default: _view(lambda view: view.permute(range(len(view.shape))[::-1])),
    aten.expand.default: _shaped(StridedView.expand),
    aten.unsqueeze.default: _view(StridedView.insert),
    aten.as_strided.default: _as_strided,
    aten.slice.Tensor: _slice,
    aten.select.int: _view(StridedView.select),
    **{target: _view(_squeeze) for target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)},
    **dict.fromkeys(_COPIES, _same),
    aten._to_copy.default: _to,
    prims.convert_element_type.default: _to,
    **{
        target: _constant
        for target in (
            *(aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.new_full.default),
            *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default),
            *(aten.ones.default, aten.ones_like.default, aten.new_ones.default),
        )
    },
    **{
        target: _arange
        for target in (aten.arange.default, aten.arange.start, aten.arange.start_step, prims.iota.default)
    },
    aten.add.Tensor: _scaled("add"),
    aten.sub.Tensor: _scaled("sub"),
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu,
    aten.clamp.default: _clamp,
    aten.pow.Tensor_Scalar: _pow,
    aten.leaky_relu.default: _named("leaky_relu", 0.01),
    aten.softplus.default: _named("softplus", 1, 20),
    aten.elu.default: _named("elu", 1, 1, 1),
    aten.hardtanh.default: _named("clamp", -1, 1),
    aten.sum.default: _reduce("sum"),
    aten.sum.dim_IntList: _reduce("sum"),
    aten.mean.default: _reduce("mean"),
    aten.mean.dim: _reduce("mean"),
    aten.amax.default: _reduce("max"),
    aten.amin.default: _reduce("min"),
    aten.any.dim: _reduce("any"),
    aten.any.default: _reduce("any"),
    aten.all.dim: _reduce("all"),
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _padded,
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
}


def _keep_scale(terms: _Terms, seed: Any, p: float) -> tuple[Expression, Expression]:
    """(whether dropout is off, the factor of what is kept)."""
    off = Compute("eq", (terms.reader.of(seed), Constant(_DROPOUT_OFF, (), "int64")), (), "bool")
    scale = Constant(1 / (1 - p) if p < 1 else 0.0, (), "float32", is_argument=True)
    return off, Compute("where", (off, Constant(1.0, (), "float32"), scale), (), "float32")


def _dropout(terms: _Terms, x: Any, seed: Any, p: float, stream: int) -> tuple[Expression, ...]:
    """lit_ort's dropout: element (row, column) of the last axis has a random number of the seed and the stream."""
    reader, given = terms.reader, terms.given(x)
    shape = given.shape
    if not shape:
        raise NotRegional("dropout of one element")
    strides = tuple(product(shape[axis + 1 : -1]) for axis in range(len(shape) - 1))
    row = Read(None, StridedView(shape, (*strides, 0)), "int64")
    spread = reader.broadcast(reader.of(seed), shape)
    number = Constant(stream, shape, "int64", is_argument=True)
    random = Compute("random", (spread, number, row, _along(shape, len(shape) - 1)), shape, "float32")
    off, scale = _keep_scale(terms, seed, p)
    drawn = Compute("ge", (random, Constant(p, shape, "float32", is_argument=True)), shape, "bool")
    keep = Compute("logical_or", (drawn, reader.broadcast(off, shape)), shape, "bool")
    mask = reader._value(terms.node.name, keep).read()
    return _masked(terms, given, mask, scale), mask


def _dropout_backward(terms: _Terms, grad: Any, mask: Any, seed: Any, p: float) -> tuple[Expression, ...]:
    return (_masked(terms, terms.given(grad), terms.reader.of(mask), _keep_scale(terms, seed, p)[1]),)


def _masked(terms: _Terms, x: Expression, mask: Expression, scale: Expression) -> Expression:
    product = terms.apply("mul", x, scale)
    return Compute("where", (mask, product, Constant(0, x.shape, product.dtype)), x.shape, product.dtype)


def _labels(reader: _Reader, target: Any, ignore_index: int) -> tuple[Expression, Expression]:
    """(the class of each row, or 0 if the row is ignored; whether it isn't)."""
    labels = reader.of(target)
    shape = labels.shape
    if len(shape) != 1:
        raise NotRegional("a loss of one row")
    valid = Compute("ne", (labels, Constant(ignore_index, shape, labels.dtype)), shape, "bool")
    return Compute("where", (valid, labels, Constant(0, shape, labels.dtype)), shape, labels.dtype), valid


def _taken(reader: _Reader, node: fx.Node, x: Any, index: Expression, axis: int) -> Expression:
    """An element of each row of a matrix, or an element of a vector for each index."""
    source = reader._as_read(reader.of(x), node.name)
    assert source.value is not None
    rows = source.view.strides[:axis] or (0,)
    view = StridedView(index.shape, rows, source.view.offset)
    return Take(source.value, view, index, source.view.strides[axis], source.shape[axis], source.dtype)


def _nll_loss(
    terms: _Terms, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[Expression, ...]:
    """(the mean or the sum of -x at each row's label, times the label's weight; the sum of weights)."""
    reader, node = terms.reader, terms.node
    dtype = computed_in(terms.given(x).dtype)
    if reduction == 0 or len(terms.given(x).shape) != 2:
        raise NotRegional("a loss of each row")
    index, valid = _labels(reader, target, ignore_index)
    nothing = Constant(0.0, index.shape, dtype)
    one: Expression = Constant(1.0, index.shape, dtype)
    scale = one if weight is None else terms.to(_taken(reader, node, weight, index, 0), dtype)
    picked = terms.apply("mul", terms.to(_taken(reader, node, x, index, 1), dtype), scale)
    losses = Compute("where", (valid, terms.apply("neg", picked), nothing), index.shape, dtype)
    weights = Compute("where", (valid, scale, nothing), index.shape, dtype)
    loss, total = (terms.squeezed(terms.reduce("sum", part, [0]), [0]) for part in (losses, weights))
    return (terms.apply("div", loss, total) if reduction == 1 else loss), total


def _nll_loss_backward(
    terms: _Terms, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total: Any
) -> tuple[Expression, ...]:
    reader, given = terms.reader, terms.given(x)
    shape = given.shape
    if reduction == 0 or len(shape) != 2:
        raise NotRegional("a loss of each row")
    index, valid = _labels(reader, target, ignore_index)
    share = terms.given(grad) if reduction == 2 else terms.apply("div", terms.given(grad), terms.given(total))
    if weight is not None:
        share = terms.apply("mul", share, terms.to(_taken(reader, terms.node, weight, index, 0), share.dtype))
        share = viewed(share, lambda view: view.insert(-1))
    rows = [reader.broadcast(viewed(part, lambda view: view.insert(-1)), shape) for part in (index, valid)]
    own = Compute("eq", (_along(shape, 1), reader.cast(rows[0], "int64")), shape, "bool")
    hit = Compute("logical_and", (own, rows[1]), shape, "bool")
    value = reader.broadcast(terms.apply("neg", share), shape)
    return (Compute("where", (hit, value, Constant(0.0, shape, value.dtype)), shape, value.dtype),)


# Operators of lit_ort, by name, since this room doesn't define them.
_OF_LIT_ORT: dict[str, Callable[..., tuple[Expression | None, ...]]] = {
    "lit_ort.dropout.default": _dropout,
    "lit_ort.dropout_backward.default": _dropout_backward,
}
# Operators with several results.
_SEVERAL: dict[Any, Callable[..., tuple[Expression | None, ...]]] = {
    **ROW_OPERATORS,
    aten.split_with_sizes.default: _split,
    aten.split.Tensor: _split,
    aten.unbind.int: _unbind,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
}
