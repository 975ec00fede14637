"""`lit_ort.export`: a module becomes an ONNX file, checked against the module."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lit_ort.errors import ExportError
from lit_ort.export.call import FORWARD, call_of, evaluating
from lit_ort.export.last_fit import batch_of_last_fit
from lit_ort.export.result import Exported

FLOAT16, BFLOAT16, INT8 = "float16", "bfloat16", "int8"
# The largest error that each form may have: of what float32 rounds, of 11 and 8 bits a weight, of scales of 8 bits.
TOLERANCES = {None: 1e-4, FLOAT16: 1e-2, BFLOAT16: 5e-2, INT8: 0.1}
# The newest opset that onnxruntime-training 1.19 reads in full, and those that torch's exporter writes.
OPSET, OPSETS = 20, range(18, 22)


def export(
    module: nn.Module,
    path: str | os.PathLike[str],
    batch: Any = None,
    *,
    step: str = FORWARD,
    dynamic: bool | Mapping[str, Mapping[int, str]] = True,
    opset: int = OPSET,
    half: str | None = None,
    quantize: str | None = None,
    verify: bool = True,
    tolerance: float | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Exported:
    """Writes a module, in eval mode and left as it was, as an ONNX model of standard operators.

    Args:
        module: a LightningModule or any module, on the CPU.
        path: of the file; what was there before stays until the new one is whole and has been compared.
        batch: of `forward` a dictionary of keyword arguments, a tuple of arguments, or the only one; of `predict_step`
            what a loader gives. None takes the module's `example_input_array` or, after fit, a batch of its training
            data. Its tensors become inputs; all else stays as it is.
        step: `forward` or `predict_step`.
        dynamic: True lets every dimension change whose size the module doesn't compute with as a constant; a
            dictionary, such as `{"tokens": {0: "batch", 1: "length"}}`, names those that have to; False fixes all. A
            size may be a sum: `{"attention_mask": {1: "past + length"}}`.
        opset: of ONNX's operators, 18 to 21.
        half: `float16` or `bfloat16` keeps the weights in 16 bits, and computes in float32 with them.
        quantize: `int8` computes products with weights in 8 bits.
        verify: runs the model in a plain session, in a process without torch, at the batch's sizes, at half of them
            and at one.
        tolerance: the largest error that verification accepts, as a part of the largest value of a result; by default
            1e-4, for float16 1e-2, for bfloat16 5e-2, for int8 0.1.
        input_names, output_names: instead of those of the step's parameters and of its result.
        metadata: more texts to keep in the file, beside the class and the versions.

    Raises:
        ExportError: a value outside its rule, a batch that doesn't fit, an operator that ONNX doesn't have, or results
            that are not the module's. No file is left then.
    """
    # What follows imports onnx, which training doesn't need.
    from lit_ort.export.graph import model_of
    from lit_ort.export.write import describe, write

    form = _form_of(half, quantize)
    if opset not in OPSETS:
        raise ExportError(f"opset={opset} is not built. Use one of {OPSETS.start} to {OPSETS.stop - 1}.")
    target = Path(path)
    batch = _example(module, step) if batch is None else batch
    with evaluating(module):
        call = call_of(module, batch, step, input_names, output_names)
        model = model_of(call, dynamic, opset)
        describe(model, module, step, metadata or {})
        exported = write(model, target, call, form, verify, TOLERANCES[form] if tolerance is None else tolerance)
    return dataclasses.replace(exported, was_training=module.training)


def _example(module: nn.Module, step: str) -> Any:
    example = getattr(module, "example_input_array", None)
    example = batch_of_last_fit(module, step) if example is None else example
    if example is None:
        raise ExportError(
            f"{type(module).__name__} has no example_input_array and wasn't fitted in this process. Pass a batch that "
            "the step is called with."
        )
    return example


def _form_of(half: str | None, quantized: str | None) -> str | None:
    if half not in (None, FLOAT16, BFLOAT16):
        raise ExportError(f"half={half!r} is unknown. Use None, 'float16' or 'bfloat16'.")
    if quantized not in (None, INT8):
        raise ExportError(f"quantize={quantized!r} is unknown. Use None or 'int8'.")
    if half and quantized:
        raise ExportError(f"half={half!r} and quantize={quantized!r} are two forms of the weights. Choose one.")
    return half or quantized
