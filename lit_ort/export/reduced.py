"""Smaller forms of a model: weights in 16 bits, or products in 8."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lit_ort.errors import ExportError
from lit_ort.export.export import BFLOAT16, FLOAT16
from lit_ort.export.process import run_python

_TYPES = {
    FLOAT16: (TensorProto.FLOAT16, np.dtype(np.float16)),
    BFLOAT16: (TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}
# Of fewer values it saves nothing.
_LEAST_VALUES = 64
# ONNX Runtime's own tool.
_QUANTIZE = """
import sys
import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
source, target, external = sys.argv[1:]
model = onnx.load(source, load_external_data=False)
# The tool transposes weights, and keeps the shapes that were inferred of them.
del model.graph.value_info[:]
onnx.save_model(model, source)
products = ["MatMul", "Gemm", "Gather", "LSTM"]
quantize_dynamic(
    source, target, op_types_to_quantize=products, weight_type=QuantType.QInt8, use_external_data_format=external == "1"
)
"""


def halve(model: onnx.ModelProto, half: str) -> None:
    """Keeps a model's float32 weights in 16 bits, in place: half the file, and the same products in float32.

    A plain session on the CPU has few kernels in 16 bits. It widens the weights once, when it is made.
    """
    element, dtype = _TYPES[half]
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or np.prod(tensor.dims) < _LEAST_VALUES:
            continue
        values = numpy_helper.to_array(tensor)
        if half == FLOAT16 and np.abs(values[np.isfinite(values)]).max(initial=0) > np.finfo(np.float16).max:
            raise ExportError(f"{tensor.name} has values beyond float16's 65504. Use half='bfloat16'.")
        name, narrow = tensor.name, f"{tensor.name}_{half}"
        tensor.CopyFrom(helper.make_tensor(narrow, element, values.shape, values.astype(dtype).tobytes(), raw=True))
        casts.append(helper.make_node("Cast", [narrow], [name], to=TensorProto.FLOAT))
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*casts, *nodes])


def quantize(source: Path, target: Path, external: bool) -> None:
    """Writes a model whose products of weights are in int8, with scales of activations taken at each run.

    `onnxruntime.quantization.quantize_dynamic` does it.

    Raises:
        ExportError: it can't.
    """
    run_python(
        _QUANTIZE,
        *(str(source), str(target), str(int(external))),
        problem="ONNX Runtime can't quantize the model",
        remedy="Leave quantize out.",
    )
