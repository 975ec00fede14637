"""Forward model -> training model, by ONNX Runtime's own gradient builders.

`fused_gradient` serves one scalar loss: forward and backward become one model. `split_gradient` serves any other
outputs: the model is cut at a YieldOp, at which `TrainingAgent` hands outputs out and takes their gradients in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime

from lit_ort.compiler.convert import name_nodes
from lit_ort.compiler.kernel_nodes import OPERATOR, call_at, operator_of
from lit_ort.compiler.kernels import KERNELS
from lit_ort.compiler.kernels.torch_call import BACKWARD, NAME
from lit_ort.compiler.regions import copy_regions
from lit_ort.compiler.signature import StepSignature, TrainingModel
from lit_ort.compiler.sizes import copy_examples, sizes_of
from lit_ort.compiler.stop_gradient import STOP_GRADIENT
from lit_ort.compiler.support import gradient_names, gradient_path, is_stop_gradient, require_support
from lit_ort.compiler.torch_calls import prepare_gradients
from lit_ort.errors import GradientError
from lit_ort.runtime.aten import DOMAIN, NAMESPACE, Backward, Kernel
from lit_ort.runtime.engine import ERROR_SEVERITY, ORT_ERRORS, C, quiet_onnxruntime

_HELD_GRADIENTS = "lit_ort::held_gradients"
_SAME = "lit_ort::same"


def forward_only(model: ir.Model) -> TrainingModel:
    """A model that nobody wants gradients of."""
    _finish(model)
    return TrainingModel(model, result_names(model))


def result_names(model: ir.Model) -> tuple[str, ...]:
    return tuple(str(value.name) for value in model.graph.outputs)


def fused_gradient(model: ir.Model, signature: StepSignature) -> TrainingModel:
    """Adds to the model of one scalar loss the gradient of every input that wants one, named `<input>_grad`.

    Raises:
        GradientError: an operator whose gradient is missing or not proven right.
    """
    require_support(model, signature)
    names = gradient_names(model, signature)
    loss = model.graph.outputs[signature.result_differentiable.index(True)].name
    assert loss is not None
    options = _session_options()
    _register_aten_gradients()
    _register_torch_calls(model, signature)
    _mark_inputs_twice(model.graph)
    _mark_inputs_read_twice(model.graph)
    data = _serialize(model)
    try:
        with quiet_onnxruntime():
            data = C.get_optimized_model(data, set(names), options)
            builder = C.GradientGraphBuilder(data, {loss}, set(names), loss, options)
            builder.build()
            data = builder.get_model()
    except ORT_ERRORS as error:
        raise _refused(error) from error
    training = _deserialize(data)
    _restore(training, model)
    _finish(training)
    outputs = tuple(f"{name}_grad" for name in names)
    return TrainingModel(training, result_names(model), _positions(signature, outputs), outputs)


def split_gradient(model: ir.Model, signature: StepSignature) -> TrainingModel:
    """Builds the two-phase model in which every differentiable output may come back with its own gradient.

    Raises:
        GradientError: an operator whose gradient is missing or not proven right.
    """
    require_support(model, signature)
    names = gradient_names(model, signature)
    config = C.OrtModuleGraphBuilderConfiguration()
    config.initializer_names = list(signature.input_names)
    config.initializer_names_to_train = list(names)
    config.input_names_require_grad = []
    config.build_gradient_graph = True
    config.enable_caching = False
    config.use_memory_efficient_gradient = False
    config.loglevel = C.Severity.ERROR
    transforms = C.TrainingGraphTransformerConfiguration()
    transforms.propagate_cast_ops_config = C.PropagateCastOpsConfiguration()
    transforms.enable_compute_optimizer = False
    builder = C.OrtModuleGraphBuilder()
    _register_aten_gradients()
    _register_torch_calls(model, signature)
    _mark_inputs_twice(model.graph)
    _mark_inputs_read_twice(model.graph)
    try:
        with quiet_onnxruntime():
            builder.initialize(_serialize(model), config)
            builder.build(transforms)
            info = builder.get_graph_info()
            data = builder.get_gradient_model()
    except ORT_ERRORS as error:
        raise _refused(error) from error
    training = _deserialize(data)
    _restore(training, model)
    _finish(training)
    return _split_model(training, info, signature)


def _split_model(training: ir.Model, info: Any, signature: StepSignature) -> TrainingModel:
    outputs = tuple(str(value.name) for value in training.graph.outputs)
    results = range(len(info.user_output_names))
    yielded = tuple(k for k in results if k not in info.output_grad_indices_non_differentiable)
    return TrainingModel(training, tuple(info.user_output_names), _positions(signature, outputs), outputs, yielded)


def _positions(signature: StepSignature, gradients: tuple[str, ...]) -> tuple[int | None, ...]:
    """Where the gradient of each input that wants one is among `gradients`."""
    wanted = (f"{name}_grad" for name in signature.gradient_names)
    return tuple(gradients.index(name) if name in gradients else None for name in wanted)


def _session_options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = ERROR_SEVERITY
    return options


def _register_aten_gradients() -> None:
    """Tells the builders of the gradients of ATen nodes; registering twice is harmless."""
    C.register_custom_stop_gradient_edges(_aten_key(STOP_GRADIENT), {0})
    C.register_gradient_definition(_aten_key(_SAME), [_definition(_SAME, "", ["GO(0)"], [0])])
    for kernel in KERNELS.values():
        if kernel.differentiable:
            definition = _placeholder(kernel) if kernel.backward is None else _backward_node(kernel.backward)
            C.register_gradient_definition(_aten_key(NAMESPACE + kernel.name), [definition])


def _register_torch_calls(model: ir.Model, signature: StepSignature) -> None:
    """The same for calls of torch's operators, of which each has a gradient of its own."""
    for node in prepare_gradients(model, gradient_path(model, signature)):
        call = call_at(node)
        assert call is not None
        gradients = (f"GO({k})" for k in call.used)
        kept = (*(f"I({k})" for k in range(len(node.inputs))), *(f"O({k})" for k in range(len(node.outputs))))
        backward = _definition(NAMESPACE + BACKWARD, call.describe(), (*gradients, *kept), range(call.wants))
        C.register_gradient_definition(_aten_key(NAMESPACE + NAME, call.describe()), [backward])


def _mark_inputs_twice(graph: ir.Graph) -> None:
    """Where a gradient ends at an input itself: the builders want a gradient of any node that reads an input that has
    one, and look past the mark of an end to what stands before it.
    """
    for node in list(graph):
        value = node.inputs[0] if is_stop_gradient(node) else None
        if value is not None and value.is_graph_input():
            first = _marker(value, node.attributes.get_string("operator", ""), f"{node.name}/end")
            graph.insert_before(node, first)
            node.replace_input_with(0, first.outputs[0])


def _mark_inputs_read_twice(graph: ir.Graph) -> None:
    """Where one node reads an input in two places: the builders would give two gradients the input's one name."""
    for value in dict.fromkeys(value for node in graph for value in _read_twice(node)):
        readers = tuple(value.uses())
        first = _marker(value, _SAME, f"{value.name}/same")
        for node, position in readers:
            node.replace_input_with(position, first.outputs[0])
        graph.insert_before(graph[0], first)


def _read_twice(node: ir.Node) -> list[ir.Value]:
    """Inputs of the graph; transposed ones too, as a product takes the transposition into itself."""
    read = [_before_transpose(value) for value in node.inputs if value is not None]
    return [value for value in read if value.is_graph_input() and read.count(value) > 1]


def _before_transpose(value: ir.Value) -> ir.Value:
    node = value.producer()
    read = node.inputs[0] if node is not None and node.op_type == "Transpose" else None
    return value if read is None else read


def _marker(value: ir.Value, operator: str, name: str) -> ir.Node:
    """A node that hands `value` on and that no optimizer takes away; `_finish` turns it into an Identity."""
    node = ir.node(OPERATOR, [value], {"operator": operator}, domain=DOMAIN, version=1, name=name)
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return node


def _aten_key(operator: str, overload: str = "") -> str:
    return f"{DOMAIN}::{OPERATOR}::{operator}::{overload}"


def _placeholder(kernel: Kernel) -> Any:
    """One node from the gradient of output 0 and the held gradients to those of the inputs; `_expand` replaces it.

    The builder decides by an output's position in its node whether the input of that position wants a gradient, so only
    one node with an output for each input can stand here.
    """
    inputs = ("GO(0)", *(f"O({position})" for position in kernel.gradients.values()))
    return _definition(_HELD_GRADIENTS, kernel.name, inputs, kernel.differentiable)


def _backward_node(backward: Backward) -> Any:
    return _definition(NAMESPACE + backward.kernel, "", backward.inputs, backward.wants)


def _definition(operator: str, overload: str, inputs: Sequence[str], wants: Sequence[int]) -> Any:
    node = C.GradientNodeDefinition()
    node.op_type, node.domain = OPERATOR, DOMAIN
    node.attributes = [_text("operator", operator), _text("overload_name", overload)]
    node.inputs = list(inputs)
    node.outputs = [f"GI({k})" if k in wants else "" for k in range(max(wants) + 1)]
    return node


def _text(name: str, value: str) -> Any:
    attribute = C.GradientNodeAttributeDefinition()
    attribute.name, attribute.value_json = name, json.dumps(value)
    attribute.dtype, attribute.is_tensor = "string", False
    return attribute


def _expand(graph: ir.Graph, node: ir.Node) -> None:
    """Writes a placeholder as what it stands for: each held gradient times the gradient of the result."""
    kernel = KERNELS[node.attributes.get_string("overload_name", "")]
    scale, *held = node.inputs
    given = dict(zip(kernel.gradients, held, strict=True))
    wanted = {k: value for k, value in enumerate(node.outputs) if value.name}
    products = [ir.node("Mul", [given[k], scale], name=f"{node.name}/{k}") for k in wanted]
    values = [product.outputs[0] for product in products]
    ir.convenience.replace_nodes_and_values(graph, node, [node], products, list(wanted.values()), values)


def _restore(training: ir.Model, model: ir.Model) -> None:
    """Regions, and types of the forward's values: the builder drops those of outputs, and ATen nodes infer none. A
    gradient has the type of its value; where sizes change, inference doesn't see that.
    """
    copy_regions(model, training)
    copy_examples(model.graph, training.graph)
    forward = (*model.graph.inputs, *(value for node in model.graph for value in node.outputs))
    known = {str(value.name): value for value in forward}
    for value in (value for node in training.graph for value in node.outputs):
        like = known.get(str(value.name)) or known.get(str(value.name).removesuffix("_grad"))
        if like is not None and value.type is None:
            value.type = like.type
        if like is not None and sizes_of(value) is None:
            value.shape = like.shape


def _finish(training: ir.Model) -> None:
    """Turns markers into plain Identity, expands placeholders, and names the nodes that the builder left unnamed."""
    for node in training.graph:
        if operator_of(node) == _HELD_GRADIENTS:
            _expand(training.graph, node)
        elif is_stop_gradient(node) or operator_of(node) == _SAME:
            node.domain, node.op_type, node.overload = "", "Identity", ""
            node.attributes.clear()
    name_nodes(training)


def _serialize(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString()


def _deserialize(data: bytes) -> ir.Model:
    return ir.from_proto(onnx.load_from_string(data))


def _refused(error: BaseException) -> GradientError:
    return GradientError(
        f"ONNX Runtime's gradient builder refused the graph: {str(error).splitlines()[0]}",
        remedy="Report the model of dump_dir's forward stage with this message; fallback='warn' trains it in eager.",
    )
