"""Smaller forms of a model: weights in 16 bits, or matmuls in 8 bits."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lit_ort.errors import ExportError
from lit_ort.export.form_names import BFLOAT16, FLOAT16
from lit_ort.export.process import run_python

_TYPES = {
    FLOAT16: (TensorProto.FLOAT16, np.dtype(np.float16)),
    BFLOAT16: (TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}
# Smaller weights are not worth a conversion.
_MIN_VALUES = 64
# ONNX Runtime's quantization tool.
_QUANTIZE = """
import sys
import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
source, target, external = sys.argv[1:]
model = onnx.load(source, load_external_data=False)
# The tool transposes weights but keeps their inferred shapes, so these are removed.
del model.graph.value_info[:]
onnx.save_model(model, source)
matmuls = ["MatMul", "Gemm", "Gather", "LSTM"]
# Weights have 7 bits: on CPUs without VNNI, products of two 8-bit values saturate the 16-bit sums of two.
quantize_dynamic(
    source,
    target,
    op_types_to_quantize=matmuls,
    weight_type=QuantType.QInt8,
    reduce_range=True,
    per_channel=True,
    use_external_data_format=external == "1",
)
"""


def halve(model: onnx.ModelProto, half: str) -> None:
    """Stores a model's float32 weights in 16 bits, in place, for half the file size; operators still run in float32.

    ONNX Runtime has few CPU kernels for 16 bits. A session converts the weights once, when it is created.

    Raises:
        ExportError: a weight exceeds the range of float16.
    """
    element, dtype = _TYPES[half]
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or np.prod(tensor.dims) < _MIN_VALUES:
            continue
        values = numpy_helper.to_array(tensor)
        if half == FLOAT16 and np.abs(values[np.isfinite(values)]).max(initial=0) > np.finfo(np.float16).max:
            raise ExportError(f"{tensor.name} has values beyond 65504, the largest of float16. Use half='bfloat16'.")
        name, narrow = tensor.name, f"{tensor.name}_{half}"
        tensor.CopyFrom(helper.make_tensor(narrow, element, values.shape, values.astype(dtype).tobytes(), raw=True))
        casts.append(helper.make_node("Cast", [narrow], [name], to=TensorProto.FLOAT))
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*casts, *nodes])


def quantize(source: Path, target: Path, external: bool) -> None:
    """Writes a model whose matmuls with weights are in int8; activations are scaled dynamically at each run.

    Uses `onnxruntime.quantization.quantize_dynamic`.

    Args:
        source: the path of the model; the file is changed.
        target: the path of the new model.
        external: whether weights are in a separate file.

    Raises:
        ExportError: the tool fails.
    """
    run_python(
        _QUANTIZE,
        *(str(source), str(target), str(int(external))),
        problem="ONNX Runtime can't quantize the model",
        remedy="Omit quantize.",
    )
