"""Writes the gradient of log-softmax at gathered positions as softmax and a scatter.

In:  `LogSoftmaxGrad_13(GatherElementsGrad(g[N, 1], index[N, 1]), log_probability[N, C])`
Out: `ScatterElements(Exp(log_probability), index, -1, reduction=add) * -g`
Saves a zero-filled and a summed [N, C] tensor: each row has one entry, so its sum is g itself. All three nodes work in
the buffer of `log_probability`, where nobody else reads it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern

from lit_ort.compiler.passes.base import MICROSOFT, RewritePass
from lit_ort.compiler.sizes import changes, sizes_of


class _LogSoftmaxGather(pattern.RewriteRuleClassBase):
    def pattern(self, op, gradient, shape, index, log_probability):  # type: ignore[no-untyped-def]
        scattered = op.GatherElementsGrad(
            gradient, shape, index, _domain=MICROSOFT, _outputs=["scattered"], _allow_other_attributes=True
        )
        return op.LogSoftmaxGrad_13(
            scattered, log_probability, _domain=MICROSOFT, _outputs=["result"], _allow_other_attributes=True
        )

    def check(self, context, index, log_probability, scattered, result, **_) -> pattern.MatchResult:  # type: ignore[no-untyped-def]
        outcome = pattern.MatchResult()
        columns, classes = sizes_of(index), sizes_of(log_probability)
        if columns is None or classes is None or len(classes) != 2:
            return outcome.fail(f"shapes {index.shape} and {log_probability.shape}: two known dimensions are needed")
        if changes(columns[0]):
            return outcome.fail("the number of rows changes")
        if columns != (classes[0], 1):
            return outcome.fail(f"the index has shape {columns}, and one entry a row is needed")
        for value in (scattered, result):
            if value.producer().attributes.get_int("axis", -1) not in (1, -1):
                return outcome.fail(f"{value.producer().name} works along axis 0, and rows are needed")
        return outcome

    def rewrite(self, op, gradient, index, log_probability, **_):  # type: ignore[no-untyped-def]
        columns = sizes_of(index)
        assert columns is not None
        less_one = op.Constant(value=ir.tensor(np.full(columns, -1.0, dtype=np.float32)))
        difference = op.ScatterElements(op.Exp(log_probability), index, less_one, axis=1, reduction="add")
        return op.Mul(difference, op.Neg(gradient))


class CrossEntropyGradient(RewritePass):
    name = "cross_entropy_gradient"
    rules = (_LogSoftmaxGather,)
