"""Lowers a phase of a step to an ONNX model and torch nodes, in the order of the graph."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import fx

from lit_ort._compat.devices import CPU, is_cpu
from lit_ort._compat.torch_fx import (
    arguments_of,
    base_of,
    example_of,
    first_argument,
    is_element,
    is_size,
    is_view,
    module_name,
    returned_by,
)
from lit_ort._compat.torch_ops import ASSERTIONS
from lit_ort._compat.torch_sizes import inverse_order, memory_order
from lit_ort.capture.input_sources import SEED, SOURCE
from lit_ort.capture.symbolic_terms import SymbolSources, term_of, terms_of
from lit_ort.errors import ConvertError
from lit_ort.joint.phases import PhaseGraph
from lit_ort.kernels.loss_arguments import GRADIENTS
from lit_ort.kernels.recurrent_arguments import loop_outputs
from lit_ort.lower.emitter import Emitter
from lit_ort.lower.engines import onnx_nodes
from lit_ort.lower.model import ModelBuilder, TensorType
from lit_ort.lower.native_operators import (
    GROUPS,
    convolution_inputs,
    convolution_of,
    group_inputs,
    is_native_convolution,
    is_native_group,
    is_native_loop,
    is_native_loss,
    loop_inputs,
    loop_kind,
    loss_inputs,
    loss_settings,
    memory_base,
    memory_of_inputs,
    native_lowering_of,
    obstacle,
    permuted_base,
    reads_inputs,
)
from lit_ort.lower.node_order import runs_in_order
from lit_ort.lower.operators import Lowering, lowering_of
from lit_ort.lower.placed_values import ValueType, placed_values
from lit_ort.lower.small_phases import without_session
from lit_ort.lower.torch_nodes import NodeBuilder, form_of
from lit_ort.lower.view_copies import copy_views
from lit_ort.lower.work import is_for_one_thread
from lit_ort.ops.hand_over import hand_over
from lit_ort.ops.region_operator import REGION
from lit_ort.passes.owners import memory_owner, overwritten
from lit_ort.passes.streams import STREAM
from lit_ort.runtime.argument_codec import SLOT
from lit_ort.runtime.elements import ELEMENTS
from lit_ort.runtime.program import (
    AS_IS,
    AS_REAL,
    CALLER,
    OPENMP,
    SESSION,
    ConvolutionNode,
    GroupedMatmulNode,
    LoopNode,
    LossNode,
    MatmulNode,
    Phase,
    PlacedValue,
    RegionNode,
    ResultType,
    Source,
    Statement,
    TorchNode,
)

if TYPE_CHECKING:
    from lit_ort.runtime.engines.native_sessions import NativeEngine


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A lowered phase, and its ONNX model for inspection."""

    phase: Phase
    model: onnx.ModelProto


def lower(
    graph: PhaseGraph,
    sources: SymbolSources,
    name: str,
    keeps_order: bool,
    device: torch.device = CPU,
    native: NativeEngine | None = None,
) -> Lowered:
    """Lowers a phase to an ONNX model.

    Args:
        graph: the phase.
        sources: the input and dimension of each symbolic size.
        name: the name of the model.
        keeps_order: whether the engine runs nodes in the order of the model.
        device: the device of the phase. ONNX Runtime's kernels are for the CPU; on other devices, all operators are in
            torch nodes.
        native: creates native sessions; None if the engine has none.

    Raises:
        ConvertError: a constant has a dtype that sessions don't support or is not on the CPU, or an operator has an
            argument that torch nodes don't support.
    """
    if native is not None and (not is_cpu(device) or obstacle(graph.module.graph, native.uses_openmp) is not None):
        native = None
    if native is not None:
        copy_views(graph.module.graph)
    lowering = _Lowering(graph, sources, device, native)
    for node in graph.module.graph.nodes:
        lowering.visit(node)
    return lowering.finish(name, keeps_order)


class _Lowering:
    """The state of lowering one phase."""

    def __init__(
        self,
        graph: PhaseGraph,
        sources: SymbolSources,
        device: torch.device,
        native: NativeEngine | None,
    ) -> None:
        module = graph.module
        self._module, self._sources, self._device = module, sources, device
        # The outputs after these are gradients, and values for the backward.
        self._results = graph.results
        self._builder = ModelBuilder()
        self._native, self._is_native = native, native is not None
        self._uses_openmp = native is not None and native.uses_openmp
        self._by_onnx = onnx_nodes(module.graph) if is_cpu(device) and native is None else frozenset()
        self._regions: list[RegionNode] = []
        self._matmuls: list[MatmulNode] = []
        self._loops: list[LoopNode] = []
        self._losses: list[LossNode] = []
        self._groups: list[GroupedMatmulNode] = []
        self._convolutions: list[ConvolutionNode] = []
        self._inputs: list[tuple[str, Source]] = []
        self._sizes_of_inputs: list[Any] = []
        self._names: dict[fx.Node, str] = {}
        # The order of memory of the dimensions of values that a native session has in this order, and their names in
        # the order of the graph.
        self._orders: dict[fx.Node, list[int]] = {}
        self._in_order: dict[fx.Node, str] = {}
        # Booleans from torch nodes, which are uint8 until an ONNX node needs them as booleans.
        self._bytes: set[fx.Node] = set()
        self._nodes: list[TorchNode] = []
        self._terms: dict[Any, int] = {}
        self._vectors: dict[tuple[Any, ...], str] = {}
        self._open: NodeBuilder | None = None
        self._returned: list[fx.Node] = returned_by(module.graph)
        self._is_returned = frozenset(self._returned)
        self._output_names: set[str] = set()
        # Of the values of a native session that the session computes, by their names.
        self._types: dict[str, ValueType] = {}

    def visit(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.op == "placeholder":
            self._input(node, value)
        elif node.op == "get_attr":
            self._names[node] = self._constant(node)
        elif node.op != "output" and not is_size(node) and not is_element(node):
            self._compute(node)

    def finish(self, name: str, keeps_order: bool) -> Lowered:
        if self._is_native:
            return self._finish_native(name)
        owners = collections.Counter(memory_owner(node) for node in self._returned)
        for node in self._returned:
            if is_view(node) and node not in self._names:
                builder = self._open_builder()
                if owners[memory_owner(node)] == 1 and builder.has(base_of(node)):
                    # No other output shares its memory, so no copy is needed.
                    builder.compute(node)
                else:
                    builder.materialize(node)
        self._close_builder()
        outputs = [self._output(node) for node in self._returned]
        forms = [form_of(node.meta["val"].dtype) for node in self._returned]
        model = self._builder.build(name, keeps_order)
        phase = Phase(
            model.SerializeToString(),
            tuple(self._nodes),
            tuple(self._inputs),
            tuple(outputs),
            tuple(forms),
            tuple(self._terms),
            str(self._device),
        )
        return Lowered(without_session(phase, model), model)

    def _finish_native(self, name: str) -> Lowered:
        results = [self._native_output(node) for node in self._returned]
        self._close_builder()
        outputs = self._builder.output_names
        placed = self._placed(frozenset(outputs[self._results :]))
        model = self._builder.build(name, keeps_order=False, is_native=True)
        phase = Phase(
            model.SerializeToString(),
            tuple(self._nodes),
            tuple(self._inputs),
            tuple(outputs),
            tuple(AS_IS for _ in results),
            tuple(self._terms),
            regions=tuple(self._regions),
            matmuls=tuple(self._matmuls),
            loops=tuple(self._loops),
            losses=tuple(self._losses),
            groups=tuple(self._groups),
            convolutions=tuple(self._convolutions),
            results=tuple(results),
            placed=placed,
            sizes=terms_of(self._sizes_of_inputs, self._sources),
            pool=self._pool(),
        )
        return Lowered(phase, model)

    def _placed(self, gradients: frozenset[str]) -> tuple[PlacedValue, ...]:
        """The values whose memory a run provides; they become outputs of the model."""
        assert self._native is not None
        placed = placed_values(self._builder.nodes, self._types, self._output_names, gradients, self._sources)
        if placed and not runs_in_order(self._native):
            return ()
        for value in placed:
            if value.name not in self._output_names:
                self._builder.output(value.name, value.dtype, _fixed(self._types[value.name][1]))
        return placed

    def _pool(self) -> str:
        if self._uses_openmp:
            return OPENMP
        return CALLER if is_for_one_thread(self._module.graph) else SESSION

    # Inputs

    def _input(self, node: fx.Node, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        # A session has at least one input.
        if not node.users and (self._inputs or reads_inputs(self._module.graph)):
            return
        source = dataclasses.replace(node.meta[SOURCE], form=AS_REAL if value.is_complex() else "")
        self._inputs.append((node.name, source))
        self._sizes_of_inputs.extend(size for size in value.shape if isinstance(size, torch.SymInt))
        dtype, shape = (value.dtype, _fixed(value.shape)) if self._is_native else self._boundary_type(value)
        self._require_type(node, dtype)
        # Inputs of the model are booleans, not uint8.
        self._names[node] = self._builder.input(node.name, torch.bool if value.dtype == torch.bool else dtype, shape)

    def _constant(self, node: fx.Node) -> str:
        tensor = getattr(self._module, str(node.target))
        node.meta.setdefault("val", tensor)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        self._require_type(node, tensor.dtype)
        if tensor.device != CPU:
            raise ConvertError(
                f"{node.name} is a constant on {tensor.device}, but the constants of a model must be on the CPU",
                remedy="Register it as a buffer of the module.",
                operator=str(node.target),
            )
        return self._builder.tensor(tensor)

    # Operators

    def _compute(self, node: fx.Node) -> None:
        if is_view(node):
            # A view is added where it is read.
            return
        if node.target is REGION and self._is_native:
            self._region(node)
            return
        if self._is_native and is_native_loop(node):
            self._loop(node)
            return
        if self._uses_openmp and is_native_loss(node):
            self._loss(node)
            return
        if self._uses_openmp and is_native_group(node):
            self._grouped_matmul(node)
            return
        if self._uses_openmp and is_native_convolution(node):
            self._convolution(node)
            return
        lowering = self._lowering_of(node) if self._is_native or node in self._by_onnx else None
        if lowering is None:
            self._open_builder().add(node, node.meta.get(STREAM))
        else:
            name = self._names[node] = lowering.emit(self._emitter(node))
            self._types[name] = node.meta["val"].dtype, node.meta["val"].shape

    def _region(self, node: fx.Node) -> None:
        _, text, sizes = node.args
        numbers = [example_of(size) if isinstance(size, fx.Node) else size for size in sizes]  # type: ignore[union-attr]
        self._regions.append(RegionNode(str(text), terms_of(numbers, self._sources), module_name(node)))
        inputs = [self._name_in_memory(base) for base in memory_of_inputs(node) if base is not None]
        values = node.meta["val"]
        types = [(value.dtype, _fixed(value.shape)) for value in values]
        names = self._builder.region(len(self._regions) - 1, inputs, types, node.name)
        self._types.update((name, (value.dtype, value.shape)) for name, value in zip(names, values, strict=True))
        for user in node.users:
            self._names[user] = names[arguments_of(user)[1]]

    def _loop(self, node: fx.Node) -> None:
        inputs, (mode, reverse), values = loop_inputs(node), loop_kind(node), node.meta["val"]
        _, batch, hidden = inputs["state"].meta["val"].shape
        if (tables := inputs.get("tables")) is None:
            steps, rows, _ = values[0].shape
            numbers = [steps, rows, hidden, steps * rows]
        else:
            numbers = [tables.meta["val"].shape[1] - 2, batch, hidden, values[0].shape[0]]
        sizes = terms_of(numbers, self._sources)
        self._loops.append(LoopNode(mode, reverse, values[0].dtype, sizes, tuple(inputs)))
        given = [self._name_of(value) for value in inputs.values()]
        positions = list(loop_outputs(mode, "matmuls" in inputs).values())
        # The last output is memory for the packed weights.
        add = functools.partial(self._builder.loop, len(self._loops) - 1, given)
        self._kernel(node, positions, add)

    def _loss(self, node: fx.Node) -> None:
        inputs = loss_inputs(node)
        ignore_index, mean, wanted = loss_settings(node)
        rows, width = inputs["hidden"].meta["val"].shape
        sizes = terms_of([rows, width, inputs["weight"].meta["val"].shape[0]], self._sources)
        gradients = [name for name, is_wanted in zip(GRADIENTS, wanted, strict=True) if is_wanted]
        dtype = inputs["hidden"].meta["val"].dtype
        arguments = tuple(inputs), tuple(gradients), ignore_index, mean, module_name(node)
        self._losses.append(LossNode(dtype, sizes, *arguments))
        given = [self._name_of(value) for value in inputs.values()]
        positions = [0, *(1 + GRADIENTS.index(name) for name in gradients)]
        # The last output is working memory.
        self._kernel(node, positions, functools.partial(self._builder.loss, len(self._losses) - 1, given))

    def _grouped_matmul(self, node: fx.Node) -> None:
        inputs, value = group_inputs(node), node.meta["val"]
        left, _, ends = (one.meta["val"] for one in inputs)
        is_gradient, transposed = GROUPS[node.target], node.args[3:] == (True,)
        sizes = terms_of([ends.shape[0], *left.shape, value.shape[-1]], self._sources)
        self._groups.append(GroupedMatmulNode(left.dtype, ends.dtype, sizes, is_gradient, transposed))
        given = [self._name_of(one) for one in inputs]
        output = value.dtype, _fixed(value.shape)
        name = self._names[node] = self._builder.grouped_matmul(len(self._groups) - 1, given, output, node.name)
        self._types[name] = value.dtype, value.shape

    def _convolution(self, node: fx.Node) -> None:
        kind, numbers, windows, groups = convolution_of(node)
        value, sizes = node.meta["val"], terms_of(numbers, self._sources)
        inputs = convolution_inputs(node)
        dtype = inputs[0].meta["val"].dtype
        self._convolutions.append(ConvolutionNode(kind, dtype, sizes, windows, groups))
        given = [self._name_of(one) for one in inputs]
        output = value.dtype, _fixed(value.shape)
        name = self._names[node] = self._builder.convolution(len(self._convolutions) - 1, given, output, node.name)
        self._types[name] = value.dtype, value.shape

    def _kernel(
        self, node: fx.Node, positions: Sequence[int], add: Callable[[Sequence[TensorType], str], list[str]]
    ) -> None:
        """Adds a node with some of an operator's results, and with memory of its own.

        Args:
            node: the operator.
            positions: of the results.
            add: adds the node with outputs of these types.
        """
        values = node.meta["val"]
        types = [(values[k].dtype, _fixed(values[k].shape)) for k in positions]
        found = dict(zip(positions, add([*types, (values[0].dtype, None)], node.name), strict=False))
        self._types.update((name, (values[k].dtype, values[k].shape)) for k, name in found.items())
        self._names.update((user, found[k]) for user in node.users if (k := arguments_of(user)[1]) in found)

    def _lowering_of(self, node: fx.Node) -> Lowering | None:
        return native_lowering_of(node) if self._is_native else lowering_of(node)

    def _emitter(self, node: fx.Node) -> Emitter:
        matmul_of = self._matmul_of if self._uses_openmp else None
        return Emitter(node, self._builder, self._name_of, self._vector_of, matmul_of)

    def _matmul_of(self, node: MatmulNode) -> int:
        self._matmuls.append(dataclasses.replace(node, sizes=terms_of(node.sizes, self._sources)))
        return len(self._matmuls) - 1

    def _name_of(self, node: fx.Node) -> str:
        """The name of a value as an input of an ONNX node."""
        name = self._name_in_memory(node)
        if node in self._orders and node not in self._in_order:
            order = inverse_order(self._orders[node])
            self._in_order[node] = self._builder.node("Transpose", [name], node.name, perm=order)
        return self._in_order.get(node, name)

    def _name_in_memory(self, node: fx.Node) -> str:
        """The name of a value with its dimensions in the session's order; booleans are cast from uint8 if necessary."""
        if self._open is not None and (self._open.has(node) or self._is_pending_view(node)):
            self._close_builder()
        if node not in self._names:
            lowering = self._lowering_of(node)
            if lowering is not None and lowering.view:
                self._names[node] = lowering.emit(self._emitter(node))
            else:
                self._open_builder().materialize(node)
                self._close_builder()
        if node in self._bytes:
            self._bytes.discard(node)
            self._names[node] = self._builder.node("Cast", [self._names[node]], node.name, to=ELEMENTS[torch.bool])
        return self._names[node]

    def _is_pending_view(self, node: fx.Node) -> bool:
        while node not in self._names and is_view(node):
            node = first_argument(node)
        return self._open is not None and self._open.has(node)

    def _open_builder(self) -> NodeBuilder:
        if self._open is None:
            self._open = NodeBuilder(self._size_index, self._orders)
        return self._open

    def _close_builder(self) -> None:
        builder, self._open = self._open, None
        if builder is None:
            return
        outputs = [value for node in builder.computed for value in _values(node) if self._is_needed(value, builder)]
        checks = [node for node in builder.computed if node.target in ASSERTIONS]
        if self._is_native and checks and not outputs:
            # A custom operator has an output at least.
            outputs = [first_argument(checks[0])]
            builder.materialize(outputs[0])
        index = len(self._nodes)
        is_in_place = self._is_native and _put_written_first(builder, outputs)
        if self._is_native:
            self._orders.update((value, order) for value in outputs if (order := _permuted_order(value)) is not None)
        node = builder.close(outputs)
        if not outputs and not any(statement.results == 0 for statement in node.statements):
            return
        inputs = [self._names[value] for value in builder.inputs]
        if node.anchored:
            inputs.append(self._anchor())
        self._nodes.append(node)
        types = [self._output_type(value) for value in outputs]
        label = next(iter(builder.computed)).name
        names = self._builder.torch_node(index, inputs, types, label, is_in_place)
        for value, name in zip(outputs, names, strict=True):
            self._names[value] = name
            result = value.meta["val"]
            if not result.is_complex():
                shape = [result.shape[dim] for dim in self._orders.get(value, range(result.dim()))]
                self._types[name] = torch.uint8 if result.dtype == torch.bool else result.dtype, shape
            if result.dtype == torch.bool:
                self._bytes.add(value)

    def _is_needed(self, value: fx.Node, builder: NodeBuilder) -> bool:
        """Whether a value of a builder is read outside of it."""
        if value in self._is_returned:
            return True
        return any(
            self._is_needed(user, builder) if is_view(user) and user not in builder.computed else not builder.has(user)
            for user in value.users
        )

    def _anchor(self) -> str:
        """An input for a node without inputs, which ONNX Runtime would otherwise fold to a constant.

        A phase without inputs has the seed as one, since every run has a seed.
        """
        if not self._inputs:
            self._inputs.append((SEED.kind, SEED))
            self._builder.input(SEED.kind, torch.int64, [])
        return self._inputs[0][0]

    # Outputs

    def _output(self, node: fx.Node) -> str:
        dtype, shape = self._boundary_type(node.meta["val"])
        name = self._names[node]
        if node.op in ("placeholder", "get_attr") or name in self._output_names:
            name = self._copied(node, name)
        self._output_names.add(name)
        shape = None if node.target is hand_over else shape
        is_bool = node.meta["val"].dtype == torch.bool and node not in self._bytes
        self._builder.output(name, torch.bool if is_bool else dtype, shape)
        return name

    def _native_output(self, node: fx.Node) -> ResultType:
        base, dtype = permuted_base(node), node.meta["val"].dtype
        if base is None or (base not in self._orders and not base.meta["val"].is_contiguous()):
            base = memory_base(node)
            name, shape = self._name_of(base), base.meta["val"].shape
        else:
            name, shape = self._name_in_memory(base), base.meta["val"].shape
            shape = [shape[dim] for dim in self._orders.get(base, range(len(shape)))]
        if base.op in ("placeholder", "get_attr") or name in self._output_names:
            name = self._builder.node("Identity", [name], "output")
        self._output_names.add(name)
        self._builder.output(name, dtype, _fixed(shape))
        return ResultType(dtype, terms_of(node.meta["val"].shape, self._sources), terms_of(shape, self._sources))

    def _copied(self, node: fx.Node, name: str) -> str:
        if is_cpu(self._device):
            return self._builder.node("Identity", [name], "output")
        form = form_of(node.meta["val"].dtype)
        self._nodes.append(TorchNode((form,), (Statement("aten.clone.default", ({SLOT: 0},), {}),), (1,), (form,)))
        return self._builder.torch_node(len(self._nodes) - 1, [name], [self._output_type(node)], "output")[0]

    # Sizes and dtypes

    def _size_index(self, size: Any) -> int:
        return self._terms.setdefault(term_of(size, self._sources), len(self._terms))

    def _vector_of(self, sizes: Sequence[Any]) -> str:
        terms = terms_of(sizes, self._sources)
        if terms not in self._vectors:
            name = f"sizes_{len(self._vectors)}"
            self._inputs.append((name, Source("sizes", terms=terms)))
            self._vectors[terms] = self._builder.input(name, torch.int64, [len(terms)])
        return self._vectors[terms]

    def _output_type(self, node: fx.Node) -> tuple[torch.dtype, list[int | None] | None]:
        """The dtype and shape of a torch node's output; a gradient that the optimizer consumes has no fixed shape."""
        value = node.meta["val"]
        dtype, shape = self._boundary_type(value.permute(self._orders[node]) if node in self._orders else value)
        self._require_type(node, dtype)
        return dtype, None if node.target is hand_over else shape

    def _boundary_type(self, value: torch.Tensor) -> tuple[torch.dtype, list[int | None]]:
        """The dtype and shape of a value as an input or output of a torch node.

        A size of 0 is treated as unknown: oneDNN's fake kernels return it for workspaces, whose size oneDNN chooses.
        """
        shape = [size if isinstance(size, int) and size > 0 else None for size in value.shape]
        if value.is_complex():
            return value.dtype.to_real(), [*shape, 2]
        return (torch.uint8 if value.dtype == torch.bool else value.dtype), shape

    def _require_type(self, node: fx.Node, dtype: torch.dtype) -> None:
        if dtype not in ELEMENTS:
            raise ConvertError(
                f"the dtype of {node.name} is {dtype}, which sessions don't support",
                remedy="Exclude this code from the step with torch.compiler.disable.",
                operator=str(node.target),
            )


def _put_written_first(builder: NodeBuilder, outputs: list[fx.Node]) -> bool:
    """Puts an input that a node writes into, and the output with its memory, before all others; False if there is none.

    A node has one such pair: others are copied.
    """
    for output in outputs:
        written = overwritten(output)
        while written is not None and written not in builder.inputs:
            written = overwritten(written)
        if written is not None and written.op == "call_function":
            for values, first in ((builder.inputs, written), (outputs, output)):
                values.remove(first)
                values.insert(0, first)
            return True
    return False


def _permuted_order(node: fx.Node) -> list[int] | None:
    """The order of memory of a result's dimensions, if it is another than that of the dimensions."""
    value = node.meta["val"]
    if is_view(node) or value.is_contiguous() or value.storage_offset() != 0:
        return None
    return memory_order(value)


def _fixed(shape: Sequence[Any]) -> list[int | None]:
    """The sizes of a value that are the same in every run."""
    return [size if isinstance(size, int) else None for size in shape]


def _values(node: fx.Node) -> list[fx.Node]:
    """The result of a node, or those of its results that are used."""
    elements = [user for user in node.users if is_element(user)]
    return elements or [node]
