"""`lit_ort.export`: exports a module as an ONNX file and compares the file with the module."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lit_ort.errors import ExportError
from lit_ort.export.call import FORWARD, call_of, evaluating
from lit_ort.export.export_result import Exported
from lit_ort.export.form_names import BFLOAT16, FLOAT16, INT8
from lit_ort.export.last_fit import batch_of_last_fit

# The default tolerance of each form: rounding of float32, of weights with 11 and 8 bits, and of matmuls in 8 bits.
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
    """Exports a module in eval mode as an ONNX model of standard operators; the module itself is not changed.

    Args:
        module: a LightningModule or any other module, on the CPU.
        path: the path of the file. An existing file is replaced only after the new one has been written and compared.
        batch: for `forward` a dictionary of keyword arguments, a tuple of arguments, or the only argument; for
            `predict_step` a batch of the dataloader. None uses the module's `example_input_array` or, after fit, a
            batch of its training data. The tensors of the batch become inputs; all other values become constants.
        step: `forward` or `predict_step`.
        dynamic: True makes every dimension dynamic whose size the module doesn't use as a constant; a dictionary, such
            as `{"tokens": {0: "batch", 1: "length"}}`, names the dimensions that must be dynamic; False fixes all
            sizes. A size can be a sum: `{"attention_mask": {1: "past + length"}}`.
        opset: the ONNX opset, 18 to 21.
        half: `float16` or `bfloat16` stores the weights in 16 bits; operators still run in float32.
        quantize: `int8` computes matmuls with weights in 8 bits.
        verify: whether to run the model in a plain session, in a process without torch, at the batch's sizes, at half
            of them and at one.
        tolerance: the largest error that verification accepts, relative to the largest value of a result; by default
            1e-4, for float16 1e-2, for bfloat16 5e-2, for int8 0.1.
        input_names, output_names: names that replace those of the step's parameters and of its result.
        metadata: further texts to store in the file, in addition to the class and the versions.

    Raises:
        ExportError: an argument is invalid, the step rejects the batch, ONNX lacks an operator, or results differ from
            the module's. No file is written then.
    """
    # These imports load onnx, which training doesn't need.
    from lit_ort.export.exported_graph import model_of
    from lit_ort.export.write import describe, write

    form = _form_of(half, quantize)
    if opset not in OPSETS:
        raise ExportError(f"opset={opset} is not supported. Use one of {OPSETS.start} to {OPSETS.stop - 1}.")
    target = Path(path)
    batch = _example(module, step) if batch is None else batch
    with evaluating(module):
        call = call_of(module, batch, step, input_names, output_names)
        model, fixed_sizes = model_of(call, dynamic, opset)
        describe(model, module, step, metadata or {})
        exported = write(model, target, call, form, verify, TOLERANCES[form] if tolerance is None else tolerance)
    return dataclasses.replace(exported, was_training=module.training, fixed_sizes=fixed_sizes)


def _example(module: nn.Module, step: str) -> Any:
    example = getattr(module, "example_input_array", None)
    example = batch_of_last_fit(module, step) if example is None else example
    if example is None:
        raise ExportError(
            f"{type(module).__name__} has no example_input_array and wasn't fitted in this process. Pass a batch with "
            "which the step is called."
        )
    return example


def _form_of(half: str | None, quantized: str | None) -> str | None:
    if half not in (None, FLOAT16, BFLOAT16):
        raise ExportError(f"half={half!r} is unknown. Use None, 'float16' or 'bfloat16'.")
    if quantized not in (None, INT8):
        raise ExportError(f"quantize={quantized!r} is unknown. Use None or 'int8'.")
    if half and quantized:
        raise ExportError(f"half={half!r} and quantize={quantized!r} can't be combined. Use one of them.")
    return half or quantized
