"""Prepares the programs of torch.export for torch's ONNX exporter."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._export.utils import _compiling_state_context
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.modules import transformer
from torch.utils._pytree import tree_flatten

from lit_ort._compat.patching import removed_entry, replaced, replaced_entry
from lit_ort._compat.recurrent_shapes import results_of, shapes_without_steps

_aten = torch.ops.aten
# A loop over the first dimension of tensors. Its step gets the values that it carries, a slice of each tensor, and more
# values that are the same at each step; it returns the new carried values, and slices of results.
scan: Any = torch.ops.higher_order.scan
# The recurrent layers that ONNX has, in the form of ATen's operators.
_WHOLE_LAYERS = (_aten.lstm.input, _aten.gru.input)
# The name of a size in a program whose function takes one tuple of tensors.
_SIZE_OF_INPUT = re.compile(r"\[(\d+)\]\.size\(\)\[(\d+)\]$")
_PACKAGE = str(Path(__file__).parents[1])
_VIEWS = (_aten.view.default, _aten.reshape.default)


@contextmanager
def layers_of_any_length() -> Iterator[None]:
    """Makes torch.export and its ONNX exporter compute the shapes of LSTMs and GRUs without tracing each time step.

    That would fix the length of their inputs. The layers are kept whole, and exported as ONNX's operators.
    """
    with shapes_without_steps(), ExitStack() as stack:
        for target in _WHOLE_LAYERS:
            stack.enter_context(removed_entry(target.py_kernels, torch._C.DispatchKey.Autograd))
            stack.enter_context(replaced_entry(target.py_kernels, torch._C.DispatchKey.Meta, results_of))
            stack.enter_context(replaced_entry(decomposition_table, target, results_of))
            stack.callback(target._dispatch_cache.clear)
            target._dispatch_cache.clear()
        yield


@contextmanager
def recorded_specializations() -> Iterator[dict[tuple[int, int], str]]:
    """Records where code makes sizes of inputs constant while torch.export traces it.

    Yields:
        For the position of an input and a dimension, the stack trace of the code.
    """
    traces: dict[tuple[int, int], str] = {}
    replace_symbol: Any = ShapeEnv._set_replacement

    def record(environment: Any, symbol: Any, target: Any, reason: str) -> None:
        for source in environment.var_to_sources.get(symbol, ()) if target.is_number else ():
            found = _SIZE_OF_INPUT.search(source.name)
            if found is not None:
                traces.setdefault((int(found[1]), int(found[2])), _trace_below_this_package())
        replace_symbol(environment, symbol, target, reason)

    with replaced(ShapeEnv, "_set_replacement", record):
        yield traces


def _trace_below_this_package() -> str:
    """The stack trace of the modules that this package calls, without torch's tracing of them."""
    frames = traceback.extract_stack()
    first = next(k for k, frame in enumerate(frames) if frame.filename.startswith(_PACKAGE))
    modules = str(Path(nn.__file__).parent)
    others = (_PACKAGE, str(Path(torch.__file__).parent), "<")
    called = [f for f in frames[first:] if f.filename.startswith(modules) or not f.filename.startswith(others)]
    return "".join(traceback.format_list(called))


def prepare_for_onnx(program: ExportedProgram) -> None:
    """Works around, in place, two errors of torch 2.13's exporter when it decomposes a program.

    Size checks can lose their inputs. They are generated only for a program with example inputs, which are removed.

    The exporter assumes that a view is possible even if strides don't allow it. Each view is replaced by a view of a
    copy. ONNX has no strides, so the copy costs nothing.
    """
    program._example_inputs = None  # pyright: ignore[reportAttributeAccessIssue]
    graph = program.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _VIEWS:
            with graph.inserting_before(node):
                settings: dict[str, Any] = {"memory_format": torch.contiguous_format}
                copied = graph.call_function(_aten.clone.default, (node.args[0],), settings)
            copied.meta.update({key: value for key, value in node.meta.items() if key != "val"})
            copied.meta["val"] = node.args[0].meta["val"]
            node.replace_input_with(node.args[0], copied)
    program.graph_module.recompile()


class Trace(NamedTuple):
    """Operators of a function of tensors, and for each tensor the dimensions whose sizes can still be any."""

    module: fx.GraphModule
    dimensions: tuple[tuple[int, ...], ...]

    @property
    def is_functional(self) -> bool:
        """Whether no operator writes into a tensor, as some do that compute with constants alone."""
        operators = (node.target for node in self.module.graph.nodes if node.op == "call_function")
        return not any(isinstance(o, torch._ops.OpOverload) and o._schema.is_mutable for o in operators)


def trace_of(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    dimensions: Sequence[Collection[int]],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Trace:
    """Records the operators that a function calls, those of its backwards among them, with sizes as symbols.

    Args:
        function: takes tensors and returns a tuple of tensors.
        tensors: examples.
        dimensions: for each tensor, the dimensions whose sizes become symbols. A size that the function uses as a
            number becomes constant.
        decompositions: functions that compute operators.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = []
    for position, (tensor, own) in enumerate(zip(tensors, dimensions, strict=True)):
        sizes = [DimDynamic.DYNAMIC if k in own else DimDynamic.STATIC for k in range(tensor.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        source = ConstantSource(f"[{position}]")
        fakes.append(mode.from_tensor(tensor, static_shapes=False, symbolic_context=context, source=source))
    # Without MKL-DNN's operators, which have no decompositions.
    with (
        mode,
        _compiling_state_context(),
        enable_python_dispatcher(),
        torch.backends.mkldnn.flags(enabled=False),
        # Reads the values of a mask, to choose another form of attention for it.
        replaced(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True),
    ):
        record = make_fx(
            dispatch_functionalize(function), decompositions, _allow_non_fake_inputs=True, record_stack_traces=True
        )
        module = record(*fakes)
    module.graph.eliminate_dead_code()
    module.recompile()
    pairs = zip(fakes, dimensions, strict=True)
    return Trace(module, tuple(tuple(k for k in own if _is_symbol(fake.shape[k])) for fake, own in pairs))


def program_of(trace: Trace) -> ExportedProgram:
    """A trace as a program of torch.export, without tracing it again; the trace's graph is changed.

    Constants become inputs that have a value.
    """
    graph, constants = trace.module.graph, {}
    inputs, output = [node for node in graph.nodes if node.op == "placeholder"], next(reversed(graph.nodes))
    lifted: dict[str, fx.Node] = {}
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if isinstance(getattr(trace.module, name), fx.GraphModule):
            continue  # the step of a loop
        if name not in lifted:
            with graph.inserting_before(inputs[0]):
                lifted[name] = graph.placeholder(f"constant_{len(lifted)}")
            lifted[name].meta.update(node.meta)
            constants[name] = getattr(trace.module, name)
        node.replace_all_uses_with(lifted[name])
        graph.erase_node(node)
    results = output.args[0]
    output.args = (tuple(results),)
    signature = ExportGraphSignature(
        [
            *(InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name) for name, node in lifted.items()),
            *(InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None) for node in inputs),
        ],
        [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results],
    )
    arguments, returned = (tree_flatten(value)[1] for value in ((tuple(inputs), {}), tuple(results)))
    call = ModuleCallEntry("", ModuleCallSignature([], [], arguments, returned))
    return ExportedProgram(trace.module, graph, signature, {}, {}, [call], None, constants)


def _is_symbol(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


@functools.cache
def decompositions_for_onnx() -> Mapping[Any, Callable[..., Any]]:
    """torch's decompositions of the operators that its ONNX exporter doesn't know."""
    # The exporter imports onnxscript, without which this package is importable.
    from torch.onnx._internal.exporter._decomp import (
        create_onnx_friendly_decomposition_table,
        get_onnx_implemented_overloads,
    )
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    known = get_onnx_implemented_overloads(ONNXRegistry.from_torchlib())
    return create_onnx_friendly_decomposition_table(set(known))


@contextmanager
def kept_operators() -> Iterator[None]:
    """Makes torch's ONNX exporter take a program as it is, since decomposing it is tracing it once more."""
    from torch.onnx._internal.exporter import _fx_passes

    with replaced(_fx_passes, "decompose_with_registry", lambda program, registry: program):
        yield


def decompositions_of_torch(names: Iterable[str]) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of operators that its table for export doesn't have, such as `prod.dim_int`."""
    operators = [getattr(getattr(_aten, packet), overload) for packet, overload in (n.split(".") for n in names)]
    return {operator: decomposition_table[operator] for operator in operators}
