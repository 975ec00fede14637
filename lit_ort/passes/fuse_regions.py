"""Computes what is between matmuls and other calls of libraries in regions of machine code.

In:  pointwise operators, reductions, softmax, normalizations, gathers, casts, copies, and the views that they read
Out: `lit_ort.region(tensors, region)`, few of them, which read their inputs through views and store what others read
Saves reading and writing the values in between, and most calls.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lit_ort._compat import openmp
from lit_ort._compat.torch_fx import (
    example_of,
    fake_mode_of,
    first_argument,
    is_element,
    is_size,
    is_view,
    recomputed_example,
    size_node,
    strides_of,
    tree_leaves,
)
from lit_ort._compat.torch_ops import BY_STRIDES
from lit_ort._compat.torch_sizes import hint_of, inverse_order, may_overlap, memory_order
from lit_ort.ops.region_operator import REGION
from lit_ort.regions.element_types import MEMORY_DTYPES
from lit_ort.regions.form_regions import RegionCall, Schedule, form_regions
from lit_ort.regions.graph_values import LibraryCall
from lit_ort.regions.placed_region import PlacedRegion, SizeArgument, TensorLayout, to_json
from lit_ort.regions.region_cost import is_faster
from lit_ort.regions.strided_views import StridedView, contiguous_strides
from lit_ort.regions.symbolic_size import Number, Size, number_of, numbers_of, shape_numbers, traced
from lit_ort.regions.value_expressions import NotRegional, Read, Value, order_of_elements
from lit_ort.runtime.region_calls import why_no_kernels
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "regions"
# Operators of torch use several threads above this number of elements (at::internal::GRAIN_SIZE).
MOST_ELEMENTS = 32768
# What ONNX Runtime computes beside regions. A graph of nothing else, or of little else, runs in a native session.
MATMULS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
    | {torch.ops.lit_ort.bfloat16_matmul.default}
)


def fuse_regions(module: fx.GraphModule) -> PassReport:
    """Rewrites a graph. Reports the number of regions, and why there is none."""
    reason = _obstacle(module.graph)
    if reason is not None:
        return PassReport(NAME, 0, (reason,))
    rewriter = _Rewriter(module, form_regions(module.graph))
    graph = rewriter.rewritten()
    if rewriter.count:
        module.graph = graph
        graph.eliminate_dead_code()
    return PassReport(NAME, rewriter.count)


def region_that_copies(module: fx.GraphModule) -> fx.Node | None:
    """The region that copies the only output of a graph, a view of its input; None if no region can."""
    try:
        schedule = form_regions(module.graph, copies_outputs=True)
    except NotRegional:
        return None
    graph = _Rewriter(module, schedule).rewritten()
    calls = [node for node in graph.nodes if node.op == "call_function" and not is_size(node) and not is_element(node)]
    return calls[0] if len(calls) == 1 and calls[0].target is REGION else None


def _obstacle(graph: fx.Graph) -> str | None:
    """Why a graph has no regions; None if it can have some."""
    if any(node.target is aten._conj.default for node in graph.nodes):
        return "it has lazily conjugated values"
    return why_no_kernels()


class _Rewriter:
    """Writes a schedule as a graph."""

    def __init__(self, module: fx.GraphModule, schedule: Schedule) -> None:
        self._old, self._schedule = module.graph, schedule
        self._new = fx.Graph()
        self._mode = fake_mode_of(module.graph)
        self._copies: dict[fx.Node, fx.Node] = {}
        self._values: dict[Value, fx.Node] = {}
        self._sizes: dict[Size, fx.Node] = {}
        calls = [step.node for step in schedule.steps if isinstance(step, LibraryCall) and not is_view(step.node)]
        # Native sessions on the threads of OpenMP have torch nodes of any size, but no values with gaps.
        is_plain = all(memory_order(tensor) is not None for node in calls for tensor in tensors_of(node))
        self._uses_openmp = is_plain and openmp.uses_openmp()
        # A call of torch for an operator that is faster alone would end another native session.
        self._declines = not all(node.target in MATMULS or is_small(node) for node in calls)
        known = schedule.values.known
        # The node whose elements are those of a value, and the order of its dimensions in the value.
        self._nodes: dict[Value, tuple[fx.Node, list[int]]] = {}
        for node, expression in known.items():
            order = order_of_elements(expression)
            if order is not None:
                self._nodes.setdefault(expression.value, (node, order))
        self.count = 0

    def rewritten(self) -> fx.Graph:
        for node in self._old.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)
                if node in self._schedule.values.inputs:
                    self._values[self._schedule.values.inputs[node]] = self._copies[node]
        for step in self._schedule.steps:
            if isinstance(step, LibraryCall):
                self._call(step)
            elif not self._is_declined(step):
                self._region(step)
            else:
                for value in step.outputs:
                    node, order = self._nodes[value]
                    self._values[value] = self._contiguous(self._permuted(self._of(node), order))
        output = next(node for node in reversed(self._old.nodes) if node.op == "output")
        self._new.node_copy(output, self._of)
        return self._new

    def _is_declined(self, step: RegionCall) -> bool:
        if self._uses_openmp or any(value not in self._nodes for value in step.outputs):
            return False
        return self._declines and not is_faster(step.region, step.run)

    def _size(self, number: Number) -> Any:
        if not isinstance(number, Size):
            return number
        if number not in self._sizes:
            self._sizes[number] = size_node(self._new, number.traced)
        return self._sizes[number]

    def _of(self, node: fx.Node) -> Any:
        """The node of the new graph with the value of a node of the old one; a size that is a number is this number."""
        example = example_of(node)
        if isinstance(example, int | torch.SymInt) and node not in self._copies:
            return self._size(number_of(example))
        if isinstance(example, torch.SymFloat | torch.SymBool) and node not in self._copies:
            self._copies[node] = size_node(self._new, example)
        if node not in self._copies:
            known = self._schedule.values.known.get(node)
            order = order_of_elements(known)
            if order is not None and isinstance(known, Read) and known.value in self._values:
                shape = tuple(known.shape[axis] for axis in order)
                shaped = self._shaped(self._values[known.value], shape)
                self._copies[node] = self._permuted(shaped, inverse_order(order))
            else:
                self._copy(node)
        return self._copies[node]

    def _shaped(self, node: fx.Node, shape: tuple[Number, ...]) -> fx.Node:
        if shape_numbers(node.meta["val"].shape) == shape:
            return node
        return self._called(aten.reshape.default, node, list(map(self._size, shape)))

    def _permuted(self, node: fx.Node, order: list[int]) -> fx.Node:
        return node if order == sorted(order) else self._called(aten.permute.default, node, order)

    def _called(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._new.call_function(target, args, kwargs)
        node.meta["val"] = recomputed_example(node)
        return node

    def _copy(self, node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            self._of(argument)
        if node.target in BY_STRIDES:
            source = first_argument(node)
            self._copies[source] = self._with_strides(self._of(source), example_of(source))
        copy = self._copies[node] = self._new.node_copy(node, self._of)
        tensors = [argument for argument in node.all_input_nodes if not is_size(argument)]
        if any(strides_of(self._of(one).meta.get("val")) != strides_of(one.meta.get("val")) for one in tensors):
            copy.meta["val"] = _with_strides_of(recomputed_example(copy), copy.meta["val"])

    def _with_strides(self, node: fx.Node, traced: torch.Tensor) -> fx.Node:
        """A value with the strides of the trace; what else lowering can't have, it refuses."""
        order = memory_order(traced)
        if order is None or strides_of(example_of(node)) == strides_of(traced):
            return node
        node = self._contiguous(self._called(aten.permute.default, node, order))
        return self._called(aten.permute.default, node, inverse_order(order))

    def _contiguous(self, node: fx.Node) -> fx.Node:
        if example_of(node).is_contiguous():
            return node
        return self._called(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _call(self, step: LibraryCall) -> None:
        self._copy(step.node)
        for user in step.node.users:
            if user.target is operator.getitem and step.results.get(user.args[1]) is not None:  # type: ignore[arg-type]
                self._copy(user)
                self._keep(step.results[user.args[1]], user)  # type: ignore[index]
        if None in step.results:
            self._keep(step.results[None], step.node)

    def _keep(self, value: Value, node: fx.Node) -> None:
        """Regions read the result of a call with the strides of the trace; operators read it as it is."""
        copy = self._copies[node]
        example = copy.meta.get("val")
        if isinstance(example, torch.Tensor) and not may_overlap(example):
            layout = StridedView(shape_numbers(example.shape), numbers_of(example.stride()), 0)
            if layout.merged() != value.view.merged():
                copy = self._with_strides(copy, example_of(node))
        self._values[value] = copy

    def _region(self, step: RegionCall) -> None:
        self.count += 1
        placed = PlacedRegion(
            step.region,
            step.run,
            tuple(_layout(value) for value in step.inputs),
            tuple(value.shape for value in step.outputs),
        )
        sizes: dict[Size, int] = {}
        text = to_json(placed.map(lambda number: _argument(number, sizes)))
        given = list(map(self._size, sizes))
        node = self._new.call_function(REGION, ([self._values[value] for value in step.inputs], text, given))
        with self._mode:
            shapes = [list(map(traced, value.shape)) for value in step.outputs]
            dtypes = [MEMORY_DTYPES[value.dtype] for value in step.outputs]
            node.meta["val"] = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        origin = next((self._nodes[value][0] for value in step.outputs if value in self._nodes), None)
        if origin is not None:
            node.meta.update({name: part for name, part in origin.meta.items() if name != "val"})
        for position, value in enumerate(step.outputs):
            element = self._values[value] = self._new.call_function(operator.getitem, (node, position))
            element.meta["val"] = node.meta["val"][position]


def is_small(node: fx.Node) -> bool:
    """Whether torch computes an operator on one thread, as all its values are small."""
    values = [tensor for one in (node, *node.all_input_nodes) for tensor in tensors_of(one)]
    counts = [hint_of(value.numel()) for value in values]
    return all(count is not None and count <= MOST_ELEMENTS for count in counts)


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The values of a node that are tensors."""
    value = node.meta.get("val")
    return [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, torch.Tensor)]


def _with_strides_of(example: Any, known: Any) -> Any:
    """A new example, unless its dtypes aren't the known ones, which were corrected."""
    new, old = ([leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in (example, known))
    return example if [leaf.dtype for leaf in new] == [leaf.dtype for leaf in old] else known


def _argument(number: Number, sizes: dict[Size, int]) -> int | SizeArgument:
    return SizeArgument(sizes.setdefault(number, len(sizes))) if isinstance(number, Size) else number


def _layout(value: Value) -> TensorLayout[Number]:
    is_contiguous = value.view.strides == contiguous_strides(value.shape)
    return TensorLayout(value.shape, None if is_contiguous else value.view.strides)
