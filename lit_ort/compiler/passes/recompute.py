"""Computes values of marked regions again in the backward instead of keeping them.

In:  a training model with regions; the backward reads values from inside of them
Out: a second copy of the nodes behind these values, reading what crosses a region's border, the results of attention
     and the masks of dropout; the backward reads the copies, which wait for the first gradient to reach their region
Saves the memory of everything else inside of regions, for the time of computing it twice.

Source: Chen et al. 2016, training deep nets with sublinear memory cost; attention and masks kept as in selective
recomputation, Korthikanti et al. 2022.
"""

from __future__ import annotations

import onnx_ir as ir

from lit_ort.compiler.kernel_nodes import kernel_node, kernel_of
from lit_ort.compiler.kernels import attention, dropout, linear_cross_entropy
from lit_ort.compiler.kernels.ordering import AFTER, COPY_AFTER
from lit_ort.compiler.marks import copy_marks
from lit_ort.compiler.passes.base import GraphPass
from lit_ort.compiler.regions import REGION, forward_nodes
from lit_ort.inspect import PassReport
from lit_ort.runtime.random import RANDOM_OPERATORS

# Operators whose results never take the memory of what they read.
_SPARING = frozenset({"Gemm", "MatMul", "LayerNormalization", "Gather", "Conv"})
# Kernels that draw, or take long beside what their results take.
_KEPT = (attention.NAME, linear_cross_entropy.NAME)


class Recompute(GraphPass):
    name = "recompute"

    def apply(self, model: ir.Model) -> PassReport:
        if not any(REGION in node.metadata_props for node in model.graph):
            return PassReport(self.name, 0)
        forward = forward_nodes(model)
        order = {node: k for k, node in enumerate(model.graph)}
        readers: dict[str, list[ir.Node]] = {}
        for node in model.graph:
            if node not in forward and node.op_type != "Shape":
                for region in {_region(value) for value in node.inputs if _is_inner(value, forward)}:
                    readers.setdefault(region, []).append(node)
        copies = [_Copies(region, forward) for region in readers]
        fired = sum(copy.serve(readers[copy.region], order) for copy in copies)
        model.graph.sort()
        return PassReport(self.name, fired)


class _Copies:
    """The second copy of a region's nodes, as far as the backward needs them."""

    def __init__(self, region: str, forward: set[ir.Node]) -> None:
        self.region = region
        self._forward = forward
        self._made: dict[ir.Node, ir.Node] = {}

    def serve(self, readers: list[ir.Node], order: dict[ir.Node, int]) -> int:
        """Lets nodes of the backward read copies. Returns how many nodes were copied."""
        for node in readers:
            for position, value in enumerate(node.inputs):
                if value is not None and self._is_ours(value):
                    node.replace_input_with(position, self._again(value))
        first = min(readers, key=order.__getitem__)
        assert first.graph is not None
        gradient = self._first_gradient(readers, order)
        waiting = [] if gradient is None else self._let_wait(gradient)
        first.graph.insert_before(first, [*waiting, *self._made.values()])
        return len(self._made)

    def _first_gradient(self, readers: list[ir.Node], order: dict[ir.Node, int]) -> ir.Value | None:
        """The first of the gradients that reach the region."""
        arriving = [
            value
            for node in readers
            for value in node.inputs
            if value is not None and (source := value.producer()) in order and source not in self._forward
        ]
        return min(arriving, key=lambda value: order[value.producer()], default=None)  # type: ignore[index]

    def _let_wait(self, gradient: ir.Value) -> list[ir.Node]:
        """Nodes that hand kept values to the first of the copies once a gradient is there."""
        made: dict[tuple[str, ir.Value], ir.Node] = {}
        copies = set(self._made.values())
        for node in self._made.values():
            if not any(value is not None and value.producer() in copies for value in node.inputs):
                position, value = _first_computed(node)
                kernel = AFTER if _spares_its_inputs(node) else COPY_AFTER
                assert value.dtype is not None
                if (kernel, value) not in made:
                    name = f"{value.name}__{kernel}__{self.region}"
                    waiting = kernel_node(kernel, [value, gradient], ((value.dtype, value.shape),), name)
                    waiting.outputs[0].name = name
                    made[kernel, value] = waiting
                node.replace_input_with(position, made[kernel, value].outputs[0])
        return list(made.values())

    def _is_ours(self, value: ir.Value) -> bool:
        return _is_inner(value, self._forward) and _region(value) == self.region

    def _again(self, value: ir.Value) -> ir.Value:
        """The copy of a value, or the value itself where it is kept."""
        node = value.producer()
        if node is None or not self._is_ours(value) or _is_kept(node, value):
            return value
        if node not in self._made:
            self._made[node] = self._copy(node)
        copy = self._made[node]
        return copy.outputs[node.outputs.index(value)]

    def _copy(self, node: ir.Node) -> ir.Node:
        given = [None if value is None else self._again(value) for value in node.inputs]
        kernel = kernel_of(node) or ""
        if kernel.startswith(dropout.DROPOUT):
            # Dropout with a mask that is there already is what its gradient computes.
            name = kernel.replace(dropout.DROPOUT, dropout.DROPOUT_GRADIENT, 1)
            data, mask = node.outputs
            assert data.dtype is not None
            copy = kernel_node(name, [given[0], mask, given[1]], ((data.dtype, data.shape),), f"{node.name}__again")
        else:
            copy = _copy_with(node, given)
        copy_marks(node, copy)
        for value, original in zip(copy.outputs, node.outputs, strict=False):
            value.name = f"{original.name}__again" if original.name else original.name
        return copy


def _copy_with(node: ir.Node, inputs: list[ir.Value | None]) -> ir.Node:
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        node.attributes.values(),
        overload=node.overload,
        num_outputs=len(node.outputs),
        version=node.version,
        name=f"{node.name}__again",
    )
    for value, original in zip(copy.outputs, node.outputs, strict=True):
        value.type, value.shape = original.type, original.shape
    return copy


def _spares_its_inputs(node: ir.Node) -> bool:
    return kernel_of(node) is not None or (node.op_type in _SPARING and not node.domain)


def _first_computed(node: ir.Node) -> tuple[int, ir.Value]:
    """The first input that a node computes; the first of all where none does, as in an operator on a weight."""
    given = [(position, value) for position, value in enumerate(node.inputs) if value is not None]
    computed = [(position, value) for position, value in given if value.producer() is not None]
    return (computed or given)[0]


def _region(value: ir.Value | None) -> str:
    node = value.producer() if value is not None else None
    return "" if node is None else node.metadata_props.get(REGION, "")


def _is_inner(value: ir.Value | None, forward: set[ir.Node]) -> bool:
    """Whether a value of a region's forward is read nowhere else in the forward."""
    node = value.producer() if value is not None else None
    if value is None or node not in forward or not _region(value) or value.is_graph_output():
        return False
    readers = {use.node for use in value.uses() if use.node in forward}
    return all(reader.metadata_props.get(REGION) == _region(value) for reader in readers)


def _is_kept(node: ir.Node, value: ir.Value) -> bool:
    kernel = kernel_of(node) or ""
    if kernel.startswith(dropout.DROPOUT):
        return value is not node.outputs[0]
    return not node.inputs or kernel.startswith(_KEPT) or node.op_type in RANDOM_OPERATORS
