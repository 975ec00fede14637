"""A step's function as an ONNX model of standard operators."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import onnx
import onnx_ir
from onnx import numpy_helper
from onnx_ir.passes import Sequential, common
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass, RewriteRuleSet
from onnxscript.rewriter.rules import common as rules
from torch import Tensor, fx, nn

from lit_ort._compat.torch_export import kept_operators, prepare_for_onnx, program_of, trace_of
from lit_ort.export.call import Call
from lit_ort.export.decompositions import decompositions, onnx_forms
from lit_ort.export.exported_graph import Converted, Dimensions, exported_program, model_of, onnx_program
from lit_ort.export.step_function import NEXT, StepFunction

# The first with BitwiseXor, and with ScatterElements that reduces; the exporter writes it without conversion.
OPSET = 18
# onnxruntime 1.20 reads IR versions up to this one.
IR_VERSION = 10
# Larger constants are computed at run time.
_FOLDED_ELEMENTS = 2**16


class _Replay(nn.Module):
    """Calls a traced graph, as a function of any number of tensors."""

    def __init__(self, traced: nn.Module) -> None:
        super().__init__()
        self.traced = traced

    def forward(self, *tensors: Tensor) -> Any:
        return self.traced(*tensors)


def step_model(function: StepFunction, batch: Collection[str], dynamic: bool | Dimensions) -> Converted:
    """Converts a function to a model whose inputs are all of the function's.

    Args:
        function: the function; it is called once.
        batch: the inputs whose sizes can be dynamic.
        dynamic: as in `lit_ort.export`.

    Raises:
        ExportError: an operator has no form in ONNX, or a size can't be dynamic.
    """
    function(*function.inputs.values())
    call = Call(function, tuple(function.inputs), tuple(function.inputs.values()), function.output_names)
    return model_of(call, dynamic, OPSET, [name for name in function.inputs if name not in batch], _training_program)


def _training_program(call: Call, tensors: Sequence[Tensor], dimensions: Sequence[Collection[int]], opset: int) -> Any:
    traced = trace_of(call.function, tensors, dimensions, decompositions())
    if traced.is_functional:
        program, operators = program_of(traced), kept_operators()
    else:
        # The exporter makes operators functional where it decomposes them itself.
        traced = trace_of(call.function, tensors, dimensions, decompositions(exporters=False))
        program, operators = exported_program(_Replay(traced.module), tensors, traced.dimensions), nullcontext()
        prepare_for_onnx(program)
    try:
        with operators:
            exported = onnx_program(program, call, opset, optimize=False, custom_translation_table=dict(onnx_forms()))
    # The exporter names the operator without its place.
    except Exception as error:
        raise RuntimeError(_trace_of_operator(str(error), traced.module.graph)) from error
    assert exported is not None, "a program without a file"
    _simplify(exported.model)
    # Equal outputs, such as a loss that is logged, have become one and been divided again.
    for value, name in zip(exported.model.graph.outputs, call.output_names, strict=True):
        value.name = name
    return exported


def _trace_of_operator(message: str, graph: fx.Graph) -> str:
    """Where the operator that a message names is called."""
    found = re.search(r"op='([\w.]+)'", message)
    nodes = [node for node in graph.nodes if found and found[1] and str(node.target).startswith(found[1])]
    return next((node.meta["stack_trace"] for node in nodes if node.meta.get("stack_trace")), "")


def _simplify(model: onnx_ir.Model) -> None:
    """Folds constants and merges equal nodes, in place.

    Without the other rewriting rules of onnxscript's optimizer, which take an addition of 1e-8 for one of zero.
    """
    # onnxruntime before 1.32 fuses matmuls wrongly with transposes that change nothing.
    transposes = RewriteRuleSet([rules.transpose_transpose_rule, rules.no_op_transpose_rule])
    optimizer.inline(model)
    optimizer.fold_constants(model, input_size_limit=_FOLDED_ELEMENTS, output_size_limit=_FOLDED_ELEMENTS)
    Sequential(
        common.IdentityEliminationPass(),
        RewritePass(transposes),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
        common.ClearMetadataAndDocStringPass(),
    )(model)


def changed_state(model: onnx.ModelProto) -> tuple[str, ...]:
    """The inputs of which the model returns another value."""
    sources = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Identity"}
    changed = []
    for name in (output.name.removesuffix(NEXT) for output in model.graph.output if output.name.endswith(NEXT)):
        source = f"{name}{NEXT}"
        while source in sources:
            source = sources[source]
        if source != name:
            changed.append(name)
    return tuple(changed)


def _inputs_of(node: onnx.NodeProto) -> set[str]:
    """The values that a node reads, those that only the step of a loop reads among them."""
    names = set(node.input)
    for graph in (attribute.g for attribute in node.attribute if attribute.HasField("g")):
        inner = set().union(*(_inputs_of(part) for part in graph.node), (value.name for value in graph.output))
        names |= inner - {value.name for value in graph.input} - {name for part in graph.node for name in part.output}
    return names


def part_of(model: onnx.ModelProto, outputs: Collection[str], constants: Mapping[str, Tensor]) -> onnx.ModelProto:
    """A copy of a model with some of its outputs, and with what they need.

    Args:
        model: the model.
        outputs: the names of the outputs.
        constants: values of inputs, which become initializers.
    """
    needed, nodes = set(outputs), []
    for node in reversed(model.graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(_inputs_of(node))
            nodes.append(node)
    part = onnx.ModelProto()
    part.CopyFrom(model)
    part.ir_version = min(model.ir_version, IR_VERSION)
    graph = part.graph
    for field in (graph.node, graph.input, graph.output, graph.initializer, graph.value_info):
        del field[:]
    graph.node.extend(reversed(nodes))
    graph.input.extend(value for value in model.graph.input if value.name in needed and value.name not in constants)
    graph.output.extend(value for value in model.graph.output if value.name in outputs)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    graph.initializer.extend(
        numpy_helper.from_array(value.numpy(), name) for name, value in constants.items() if name in needed
    )
    return part
