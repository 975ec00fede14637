"""A native session's model for readers: regions as functions of standard operators, names of modules.

The session's own model has custom operators, whose code is made when it is created. This one computes the same in any
ONNX Runtime.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import helper
from torch import fx

from lit_ort._compat.torch_fx import example_of, module_name
from lit_ort.lower.model import LEAF
from lit_ort.lower.native_operators import memory_of_inputs
from lit_ort.lower.onnx_values import FUNCTION_DOMAIN, uniform_function
from lit_ort.lower.region_function import SIZES, region_function
from lit_ort.lower.torch_node_function import torch_node_function
from lit_ort.ops.region_operator import REGION
from lit_ort.regions.placed_region import PlacedRegion, SizeArgument, from_json
from lit_ort.regions.symbolic_size import Number, number_of, shape_numbers
from lit_ort.runtime.engines.engine_interface import (
    CONVOLUTION_OPERATOR,
    DOMAIN,
    GROUPED_OPERATOR,
    KERNEL_DOMAIN,
    LOOP_OPERATOR,
    LOSS_OPERATOR,
    MATMUL_OPERATOR,
    POSITION,
    REGION_OPERATOR,
)
from lit_ort.runtime.program import (
    ConvolutionNode,
    MatmulNode,
    Phase,
    TorchNode,
)


def readable(
    model: onnx.ModelProto,
    graph: fx.Graph,
    phase: Phase,
    names: Mapping[str, str],
    symbols: Mapping[str, str],
) -> onnx.ModelProto:
    """The model with a function in place of each region, and of each torch node that has one.

    Matmuls are standard operators. Loops of recurrent layers, and losses over chunks, stay operators of their own.

    A function whose sizes only a run tells has them as its last input, which is an input of the model; its text says
    which.

    Args:
        model: of a native session.
        graph: the phase.
        phase: what it was lowered to.
        names: of inputs and outputs of the model for readers, by their own names.
        symbols: what the symbols of sizes are.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    # The others are outputs only so that a run tells where their memory is.
    del result.graph.output[len(phase.outputs) :]
    modules = {node.name: _place_of(node) for node in graph.nodes}
    regions = iter([node for node in graph.nodes if node.target is REGION])
    taken = collections.Counter[str]()
    given = [node for node in result.graph.node if not node.name.startswith(LEAF)]
    nodes = [standard for node in given for standard in _standard(node, phase.matmuls)]
    for node in nodes:
        place = modules.get(node.output[0].rpartition(".")[0], "")
        if (node.domain, node.op_type) == (KERNEL_DOMAIN, REGION_OPERATOR):
            _call_function(result, node, next(regions), _unique(place or "step", taken), symbols)
        elif node.domain == KERNEL_DOMAIN:
            _describe(node, phase, _unique(f"{place}.{node.op_type}".lstrip("."), taken))
        elif node.domain == DOMAIN:
            _call_torch_node(result, node, phase.nodes, _unique(f"{place}.torch".lstrip("."), taken))
        else:
            node.name = _unique(f"{place}.{node.op_type}".lstrip("."), taken)
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    versions = {FUNCTION_DOMAIN: 1} | {opset.domain: opset.version for opset in result.opset_import}
    del result.opset_import[:]
    used = dict.fromkeys(["", *(node.domain for node in nodes)])
    result.opset_import.extend(helper.make_opsetid(domain, versions[domain]) for domain in used)
    if any(node.domain == FUNCTION_DOMAIN for function in result.functions for node in function.node):
        result.functions.append(uniform_function())
    for value in (*result.graph.input, *result.graph.output):
        value.name = names.get(value.name, value.name)
    return result


def _standard(node: onnx.NodeProto, matmuls: Sequence[MatmulNode]) -> list[onnx.NodeProto]:
    """The node, or standard operators that compute its matmul."""
    if (node.domain, node.op_type) != (KERNEL_DOMAIN, MATMUL_OPERATOR):
        return [node]
    matmul, (left, right, *added) = matmuls[_position(node)], node.input
    sides, casts = [f"{node.output[0]}.{side}" for side in ("left", "right")], []
    if matmul.dtype == torch.bfloat16:
        # The kernel adds products in float32.
        casts = [
            helper.make_node("Cast", [name], [f"{side}_in_float32"], to=onnx.TensorProto.FLOAT)
            for name, side in zip((left, right), sides, strict=True)
        ]
        left, right = (cast.output[0] for cast in casts)
    if not matmul.is_batch:
        left_form, right_form = map(int, matmul.transposed)
        inputs = [left, right, *added]
        return [*casts, helper.make_node("Gemm", inputs, list(node.output), transA=left_form, transB=right_form)]
    transposes = [
        helper.make_node("Transpose", [name], [side], perm=[0, 2, 1])
        for name, side, is_transposed in zip((left, right), sides, matmul.transposed, strict=True)
        if is_transposed
    ]
    outputs = iter([one.output[0] for one in transposes])
    factors = [
        next(outputs) if is_transposed else name
        for name, is_transposed in zip((left, right), matmul.transposed, strict=True)
    ]
    return [*casts, *transposes, helper.make_node("MatMul", factors, list(node.output))]


def _position(node: onnx.NodeProto) -> int:
    return int(next(attribute.s for attribute in node.attribute if attribute.name == POSITION))


def _place_of(node: fx.Node) -> str:
    """The module of a node, and whether it is of the backward."""
    is_of_backward = "nn_module_stack" not in node.meta and "fwd_nn_module_stack" in node.meta
    return ".".join(part for part in (module_name(node), "backward" * is_of_backward) if part)


def _unique(name: str, taken: collections.Counter[str]) -> str:
    taken[name] += 1
    return name if taken[name] == 1 else f"{name}_{taken[name]}"


def _call_function(
    model: onnx.ModelProto, node: onnx.NodeProto, region: fx.Node, name: str, symbols: Mapping[str, str]
) -> None:
    shapes = [shape_numbers(_tensor(base).shape) for base in memory_of_inputs(region) if base is not None]
    function, sizes = region_function(_sized(region), shapes, name)
    model.functions.append(function)
    node.name = node.op_type = name
    node.domain = FUNCTION_DOMAIN
    del node.attribute[:]
    if sizes:
        node.input.append(f"{name}.{SIZES}")
        given = helper.make_tensor_value_info(node.input[-1], onnx.TensorProto.INT64, [len(sizes)])
        given.doc_string = ", ".join(re.sub(r"\w+", lambda word: symbols.get(word[0], word[0]), str(n)) for n in sizes)
        model.graph.input.append(given)


def _call_torch_node(model: onnx.ModelProto, node: onnx.NodeProto, torch_nodes: Sequence[TorchNode], name: str) -> None:
    function = torch_node_function(torch_nodes[_position(node)], name)
    node.name = name
    if function is not None:
        model.functions.append(function)
        node.op_type, node.domain = name, FUNCTION_DOMAIN
        del node.attribute[:]


def _describe(node: onnx.NodeProto, phase: Phase, name: str) -> None:
    """Writes what a kernel computes as attributes; `arguments` names its inputs."""
    described = helper.make_node(node.op_type, [], [], **_attributes_of(node.op_type, phase, _position(node)))
    node.name = name
    del node.attribute[:]
    node.attribute.extend(described.attribute)


def _attributes_of(kind: str, phase: Phase, number: int) -> dict[str, Any]:
    """What the kernel of a number, of those of its kind, computes."""
    if kind == LOOP_OPERATOR:
        loop = phase.loops[number]
        return {"mode": loop.mode, "direction": "reverse" if loop.reverse else "forward", "arguments": [*loop.inputs]}
    if kind == LOSS_OPERATOR:
        loss = phase.losses[number]
        reduction = "mean" if loss.mean else "sum"
        return {"reduction": reduction, "ignore_index": loss.ignore_index, "arguments": [*loss.inputs]}
    if kind == GROUPED_OPERATOR:
        matmul = phase.groups[number]
        arguments = ["rows", "rows" if matmul.is_gradient else "matrices", "ends"]
        return {"trans_a": int(matmul.is_gradient), "trans_b": int(matmul.transposed), "arguments": arguments}
    assert kind == CONVOLUTION_OPERATOR, kind
    return _convolution_attributes(phase.convolutions[number])


def _convolution_attributes(convolution: ConvolutionNode) -> dict[str, Any]:
    first = "images" if convolution.kind == "convolution" else "gradient"
    arguments = [first, "images" if convolution.kind == "weight_gradient" else "weight"]
    numbers = [list(convolution.windows[at : at + 2]) for at in range(0, 8, 2)]
    settings = dict(zip(("kernel_shape", "strides", "pads", "dilations"), numbers, strict=True))
    form = {"kind": convolution.kind, "layout": "NHWC", "group": convolution.groups}
    return {"arguments": arguments, **form, **settings}


def _tensor(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]


def _sized(region: fx.Node) -> PlacedRegion[Number]:
    """A call's region with its sizes: numbers, or polynomials of symbols."""
    _, text, sizes = region.args
    assert isinstance(sizes, Sequence)
    numbers = [_number(size) for size in sizes]
    return from_json(str(text)).map(lambda n: numbers[n.position] if isinstance(n, SizeArgument) else n)


def _number(size: Any) -> Number:
    return number_of(example_of(size) if isinstance(size, fx.Node) else size)
