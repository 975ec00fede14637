"""An ONNX model, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from lit_ort.runtime.engines.training import DOMAIN, OPERATOR

OPSET, IR_VERSION = 18, 9
# The type and shape of a value, where it has one shape.
Described = tuple[torch.dtype, Sequence[int | None] | None]

TYPES: dict[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}


class ModelBuilder:
    """Collects nodes in the order they run."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._values: list[onnx.ValueInfoProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._shared: dict[Any, str] = {}
        self._count = 0

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int | None]) -> str:
        self._inputs.append(_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: torch.dtype, shape: Sequence[int | None] | None) -> None:
        self._outputs.append(_info(name, dtype, shape))

    def node(self, operator: str, inputs: Sequence[str], name: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """A node of the standard domain; returns the names of its outputs."""
        names = [self._fresh(name) for _ in range(outputs)]
        self._nodes.append(helper.make_node(operator, list(inputs), names, name=f"{operator}_{names[0]}", **attributes))
        return names

    def torch_node(self, index: int, inputs: Sequence[str], outputs: Sequence[Described], name: str) -> list[str]:
        """A node that calls torch; `outputs` are types and shapes, which nobody could infer."""
        names = [self._fresh(name) for _ in outputs]
        self._values += [_info(n, dtype, shape) for n, (dtype, shape) in zip(names, outputs, strict=True)]
        attributes = {"operator": OPERATOR, "overload_name": str(index)}
        node = helper.make_node("ATen", list(inputs), names, name=f"torch_{names[0]}", domain=DOMAIN, **attributes)
        self._nodes.append(node)
        return names

    def constant(self, array: np.ndarray) -> str:
        """An initializer; equal ones are shared."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            name = self._shared[key] = self._fresh("constant")
            self._constants.append(numpy_helper.from_array(array, name))
        return self._shared[key]

    def tensor(self, tensor: torch.Tensor) -> str:
        """An initializer of any type."""
        name = self._fresh("constant")
        data = tensor.detach().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        self._constants.append(helper.make_tensor(name, TYPES[tensor.dtype], list(tensor.shape), raw, raw=True))
        return name

    def build(self, name: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, self._constants, value_info=self._values
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lit_ort")

    def _fresh(self, name: str) -> str:
        self._count += 1
        # Names of inputs, which are those of FX nodes, have no dot.
        return f"{name}.{self._count}"


def _info(name: str, dtype: torch.dtype, shape: Sequence[int | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TYPES[dtype], None if shape is None else list(shape))
