"""Which operators of an exported program run as torch's own, each as one node of the graph.

Those without an ONNX form, those whose gradient ONNX Runtime is not proven to have, and those that draw random numbers.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.onnx.ops
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._pytree import tree_leaves

from lit_ort.compiler.kernel_nodes import call_at
from lit_ort.compiler.kernels.torch_call import NAME, TorchCall, words_for
from lit_ort.compiler.marks import copy_marks
from lit_ort.compiler.translations import onnx_registry
from lit_ort.errors import CaptureError
from lit_ort.runtime.aten import DOMAIN, NAMESPACE

Target = torch._ops.OpOverload
aten = torch.ops.aten
# The exporter's own, of which a pass makes a kernel.
DROPOUTS = frozenset({aten.dropout.default, aten.native_dropout.default, aten.scaled_dot_product_attention.default})
RECURRENT = frozenset({aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input})
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_FX_TARGET = re.compile(r"target=torch\.ops\.([\w.]+)")


def better_called(program: ExportedProgram) -> frozenset[Target]:
    """The operators of a program that the exporter would refuse, or write as one node for each step in time, and those
    that draw: ONNX Runtime's draws of one run depend on each other.
    """
    refused = frozenset(t for t in untranslated(program) if not _is_composite(t) or t in RECURRENT)
    return refused | {t for t in targets_of(program) if torch.Tag.nondeterministic_seeded in t.tags} - DROPOUTS


def untranslated(program: ExportedProgram) -> frozenset[Target]:
    """The operators of a program that the exporter takes apart, or refuses."""
    return frozenset(t for t in targets_of(program) if not onnx_registry().is_registered(t) and _takes_tensors(t))


def targets_of(program: ExportedProgram) -> frozenset[Target]:
    """The operators of a program that could be nodes of their own: they have results, and change nothing in place."""
    targets = (node.target for node in program.graph.nodes if node.op == "call_function")
    found = (target for target in targets if isinstance(target, Target) and target.namespace != "onnx_symbolic")
    return frozenset(target for target in found if target._schema.returns and not target._schema.is_mutable)


def changes_in_place(program: ExportedProgram) -> bool:
    """Whether operators of a program write into their inputs; `detach_` only says that it does."""
    targets = (node.target for node in program.graph.nodes if node.op == "call_function")
    return any(isinstance(t, Target) and t._schema.is_mutable and t is not aten.detach_.default for t in targets)


def target_of(node: ir.Node) -> str | None:
    """The operator that an ONNX node was translated from, such as `aten.elu.default`."""
    found = _FX_TARGET.search(node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
    return found[1] if found else None


def family_of(target: Target) -> str:
    """What an operator is called whichever overload the exporter takes, such as `aten.clamp_min`."""
    name = str(target).rpartition(".")[0]
    return "aten.convolution" if name.startswith("aten.conv_transpose") else name


def as_call(target: Target, example_of: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """What takes an operator's place in a decomposition: one node that calls it.

    Args:
        target: the operator.
        example_of: from its arguments to tensors of its results' types and shapes; torch is asked by default.

    Raises:
        CaptureError: an argument or a result that a node can't have.
    """

    # Read now: while a program is decomposed, the caller's replacement stands there.
    in_python = target.py_kernels.get(_COMPOSITE)

    def call(*args: Any, **kwargs: Any) -> Any:
        if example_of is not None:
            example = example_of(*args, **kwargs)
        else:
            example = _example(target, in_python, args, kwargs)
        single = isinstance(example, torch.Tensor)
        results = (example,) if single else example
        if any(isinstance(result, torch.Tensor) and result.is_complex() for result in results):
            raise CaptureError(
                "the graph has complex numbers, and sessions compute with real ones",
                remedy="Keep this part out of the step with torch.compiler.disable, or write it with real numbers.",
                operator=str(target),
            )
        positions = tuple(k for k, result in enumerate(results) if isinstance(result, torch.Tensor))
        tensors: list[torch.Tensor] = []
        try:
            arguments = [words_for(argument, tensors) for argument in args]
            keywords = {name: words_for(argument, tensors) for name, argument in kwargs.items()}
        except TypeError as error:
            remedy = "Run this operation outside of the step."
            raise CaptureError(str(error), remedy=remedy, operator=str(target)) from error
        made = emit(TorchCall(str(target), arguments, keywords, positions), tensors, [results[k] for k in positions])
        if single:
            return made[0]
        named = dict(zip(positions, made, strict=True))
        return tuple(named.get(k) for k in range(len(results)))

    return call


def emit(call: TorchCall, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The node of a call, while a graph is exported.

    Args:
        tensors: its inputs.
        results: tensors of the types and shapes that it gives.
    """
    made = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::ATen",
        # A node has an input, also where nobody reads it.
        tensors or [torch.zeros(1)],
        {"operator": NAMESPACE + NAME, "overload_name": call.describe()},
        # Truth values travel as bytes.
        dtypes=[torch.uint8 if result.dtype == torch.bool else result.dtype for result in results],
        shapes=[result.shape for result in results],
        version=1,
    )
    pairs = zip(results, made, strict=True)
    return [value != 0 if result.dtype == torch.bool else value for result, value in pairs]


def _example(target: Target, in_python: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    """An operator's result for tensors without data, outside of the trace.

    Args:
        in_python: how torch computes it by others, where that is written in Python.
    """
    with disable_proxy_modes_tracing():
        if _is_composite(target):
            # By its own name it would be taken for the one that is being replaced.
            resized = any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves((args, kwargs)))
            if resized and in_python is not None:
                # What is not written in Python takes no sizes that change.
                return in_python(*args, **kwargs)
            return target._op_dk(_COMPOSITE, *args, **kwargs)
        return target(*args, **kwargs)


def prepare_gradients(model: ir.Model, path: Iterable[ir.Value]) -> list[ir.Node]:
    """Tells the calls on the way of a gradient which gradients they are to give, and lets them hand out their tickets.

    Args:
        path: the values that lie on the way of a gradient.

    Returns:
        those nodes; what wants a gradient stands first among their inputs.
    """
    on_path = set(path)
    prepared = []
    for node in list(model.graph):
        call = call_at(node)
        made = None if call is None else _prepare(model.graph, node, call, on_path)
        if made is not None:
            on_path.update(
                value for value, before in zip(made.outputs, node.outputs, strict=False) if before in on_path
            )
            prepared.append(made)
    return prepared


def count_calls(model: ir.Model) -> dict[str, int]:
    """How often each operator is called, the most frequent first."""
    calls = (call_at(node) for node in model.graph)
    return dict(collections.Counter(call.target for call in calls if call is not None).most_common())


def _prepare(graph: ir.Graph, node: ir.Node, call: TorchCall, path: set[ir.Value]) -> ir.Node | None:
    used = [k for k, value in enumerate(node.outputs) if value in path]
    wants = [k for k, value in enumerate(node.inputs) if value in path]
    if not used or not wants:
        return None
    order = [*wants, *(k for k in range(len(node.inputs)) if k not in wants)]
    call = call.reordered(order, len(wants), used)
    inputs = [node.inputs[k] for k in order]
    attributes = {"operator": NAMESPACE + NAME, "overload_name": call.describe()}
    count = len(node.outputs)
    made = ir.node("ATen", inputs, attributes, domain=DOMAIN, num_outputs=count + 1, name=node.name, version=1)
    ticket = made.outputs[count]
    ticket.name, ticket.dtype, ticket.shape = f"{node.name}__ticket", ir.DataType.INT64, ir.Shape([1])
    copy_marks(node, made)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [made], node.outputs, made.outputs[:count])
    return made


def _takes_tensors(target: Target) -> bool:
    return any("Tensor" in str(argument.type) for argument in target._schema.arguments)


def _is_composite(target: Target) -> bool:
    """Whether torch itself computes an operator by others, which autograd then follows."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
