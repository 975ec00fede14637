"""Replaces the loss kernel that runs on one thread by log-softmax and a gather.

In:  `SoftmaxCrossEntropyLoss(scores[N, C], labels[N] (, weights[C]))`, any reduction, any ignore_index
Out: `LogSoftmax`, `GatherElements` at the labels, and the reduction over the N picked values
Saves most of the loss's time at large C: 358 of 1,500 ms in GPT-2's training graph as built.

A label outside of 0..C-1 still raises, as in eager: it is sent to the index C, which GatherElements refuses.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern

from lit_ort.compiler.passes.base import RewritePass
from lit_ort.compiler.sizes import changes, sizes_of


class _Unweighted(pattern.RewriteRuleClassBase):
    def pattern(self, op, scores, labels):  # type: ignore[no-untyped-def]
        return op.SoftmaxCrossEntropyLoss(scores, labels, _outputs=["loss"])

    def check(self, context, scores, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        return _check(scores)

    def rewrite(self, op, scores, labels, loss, **_):  # type: ignore[no-untyped-def]
        return _log_softmax_and_gather(op, scores, labels, None, loss.producer())


class _Weighted(pattern.RewriteRuleClassBase):
    def pattern(self, op, scores, labels, weights):  # type: ignore[no-untyped-def]
        return op.SoftmaxCrossEntropyLoss(scores, labels, weights, _outputs=["loss"])

    def check(self, context, scores, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        return _check(scores)

    def rewrite(self, op, scores, labels, weights, loss, **_):  # type: ignore[no-untyped-def]
        return _log_softmax_and_gather(op, scores, labels, weights, loss.producer())


def _check(scores: ir.Value) -> pattern.MatchResult:
    result = pattern.MatchResult()
    shape = sizes_of(scores)
    if shape is None or len(shape) != 2:
        return result.fail(f"scores have shape {scores.shape}, and [batch, classes] is needed")
    if changes(shape[1]):
        return result.fail("the number of classes changes")
    if scores.dtype != ir.DataType.FLOAT:
        return result.fail(f"scores are {scores.dtype}, and float32 is proven")
    return result


def _log_softmax_and_gather(op, scores, labels, weights, node):  # type: ignore[no-untyped-def]
    shape = sizes_of(scores)
    assert shape is not None
    ignored = node.attributes.get_int("ignore_index", -100)
    reduction = node.attributes.get_string("reduction", "mean")
    one = op.Constant(value=ir.tensor([1], dtype=ir.DataType.INT64))
    valid = op.Not(op.Equal(labels, _scalar(op, ignored)))
    refused = op.Where(op.Less(labels, _scalar(op, 0)), _scalar(op, shape[1]), labels)
    index = op.Where(valid, refused, _scalar(op, 0))
    log_probability = op.LogSoftmax(scores, axis=1)
    picked = op.Squeeze(op.GatherElements(log_probability, op.Unsqueeze(index, one), axis=1), one)
    share = op.Cast(valid, to=ir.DataType.FLOAT.value)
    if weights is not None:
        picked = op.Mul(picked, op.Gather(weights, index))
        share = op.Mul(share, op.Gather(weights, index))
    losses = op.Neg(op.Where(valid, picked, op.Constant(value=ir.tensor(0.0, dtype=ir.DataType.FLOAT))))
    if reduction == "none":
        return op.Identity(losses)
    total = op.ReduceSum(losses, keepdims=0)
    return total if reduction == "sum" else op.Div(total, op.ReduceSum(share, keepdims=0))


def _scalar(op, value: int):  # type: ignore[no-untyped-def]
    return op.Constant(value=ir.tensor(value, dtype=ir.DataType.INT64))


class CrossEntropy(RewritePass):
    name = "cross_entropy"
    rules = (_Unweighted, _Weighted)
