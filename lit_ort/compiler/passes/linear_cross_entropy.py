"""Computes output layer, cross entropy and their gradients in one kernel that never holds all logits.

In:  `SoftmaxCrossEntropyLoss(Reshape*(Gemm(hidden[N, H], weight[C, H] (, bias[C]), transB=1)), labels[N] (, weights))`,
     mean or sum, N * C of at least `LARGE`, the scores read by nobody else
Out: `ATen(hidden, weight, labels, settings (, bias) (, weights), operator="lit_ort::linear_cross_entropy..")
     -> loss, and the gradients of hidden, weight and bias`
Saves the logits and their gradient, [N, C] each, four passes over them, and the rows whose label is ignored.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern

from lit_ort.compiler.autocast import same_precision
from lit_ort.compiler.kernel_nodes import call_kernel
from lit_ort.compiler.kernels.linear_cross_entropy import kernel_name, settings
from lit_ort.compiler.passes.base import RewritePass
from lit_ort.compiler.sizes import sizes_of

# Below, calling the kernel takes longer than it saves.
LARGE = 2**17


class _Unweighted(pattern.RewriteRuleClassBase):
    def pattern(self, op, scores, labels):  # type: ignore[no-untyped-def]
        return op.SoftmaxCrossEntropyLoss(scores, labels, _outputs=["loss"])

    def check(self, context, scores, loss, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        return _check(scores, loss)

    def rewrite(self, op, scores, labels, loss, **_):  # type: ignore[no-untyped-def]
        return _node(op, scores, labels, None, loss)


class _Weighted(pattern.RewriteRuleClassBase):
    def pattern(self, op, scores, labels, weights):  # type: ignore[no-untyped-def]
        return op.SoftmaxCrossEntropyLoss(scores, labels, weights, _outputs=["loss"])

    def check(self, context, scores, loss, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        return _check(scores, loss)

    def rewrite(self, op, scores, labels, weights, loss, **_):  # type: ignore[no-untyped-def]
        return _node(op, scores, labels, weights, loss)


def _check(scores: ir.Value, loss: ir.Value) -> pattern.MatchResult:
    result = pattern.MatchResult()
    shape = sizes_of(scores)
    node = loss.producer()
    assert node is not None
    if shape is None or len(shape) != 2:
        return result.fail(f"scores have shape {scores.shape}, and [rows, classes] is needed")
    if shape[0] * shape[1] < LARGE:
        return result.fail(f"{shape[0]} x {shape[1]} scores are fewer than {LARGE}")
    if node.attributes.get_string("reduction", "mean") == "none":
        return result.fail("the loss is not reduced, and its gradient is known only in the backward")
    for value in _chain(scores):
        if len(value.uses()) != 1 or value.is_graph_output():
            return result.fail(f"{value.name} is read elsewhere, so the scores have to exist")
    layer = _layer(scores)
    if layer.op_type != "Gemm" or layer.domain:
        return result.fail(f"the scores come from {layer.op_type}, and a linear layer is needed")
    if not same_precision(layer, node):
        return result.fail("the loss is computed in another precision than the layer")
    return _check_layer(layer, shape)


def _check_layer(layer: ir.Node, scores: tuple[int, ...]) -> pattern.MatchResult:
    result = pattern.MatchResult()
    plain = all(layer.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    if not plain or layer.attributes.get_int("transA", 0) or not layer.attributes.get_int("transB", 0):
        return result.fail(f"{layer.name} is no plain linear layer (transB=1, alpha and beta 1)")
    hidden, weight = layer.inputs[:2]
    if hidden is None or hidden.dtype != ir.DataType.FLOAT:
        return result.fail(f"{layer.name} computes in another type than float32")
    if sizes_of(layer.outputs[0]) != scores:
        return result.fail(f"the layer gives {layer.outputs[0].shape}, and the loss reads {list(scores)}")
    bias = layer.inputs[2] if len(layer.inputs) > 2 else None
    if sizes_of(weight) is None or (bias is not None and sizes_of(bias) != scores[1:]):
        return result.fail(f"{layer.name} has a weight or bias of unexpected shape")
    return result


def _chain(scores: ir.Value) -> list[ir.Value]:
    """The scores, and what they are reshapes of, up to the layer's output."""
    values = [scores]
    while (node := values[-1].producer()) is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        values.append(node.inputs[0])
    return values


def _layer(scores: ir.Value) -> ir.Node:
    node = _chain(scores)[-1].producer()
    return node if node is not None else ir.Node("", "Input", [])


def _node(op, scores: ir.Value, labels: ir.Value, weights: ir.Value | None, loss: ir.Value):  # type: ignore[no-untyped-def]
    layer, source = _layer(scores), loss.producer()
    assert source is not None
    hidden, weight = layer.inputs[:2]
    assert hidden is not None
    assert weight is not None
    bias = layer.inputs[2] if len(layer.inputs) > 2 else None
    mean = source.attributes.get_string("reduction", "mean") == "mean"
    values = settings(source.attributes.get_int("ignore_index", -100), mean, (True, True, bias is not None))
    given = (hidden, weight, labels, op.Constant(value=ir.tensor(values, dtype=ir.DataType.INT64)), bias, weights)
    shapes = (ir.Shape([]), hidden.shape, weight.shape, None if bias is None else bias.shape)
    kernel = kernel_name(bias is not None, weights is not None)
    result, *_ = call_kernel(op, kernel, [value for value in given if value is not None], shapes)
    return result


class LinearCrossEntropy(RewritePass):
    name = "linear_cross_entropy"
    rules = (_Unweighted, _Weighted)
