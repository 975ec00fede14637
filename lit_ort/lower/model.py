"""Builds an ONNX model node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
import torch
from onnx import helper, numpy_helper

from lit_ort.runtime.elements import ELEMENTS
from lit_ort.runtime.engines.engine_interface import (
    CONVOLUTION_OPERATOR,
    DOMAIN,
    GROUPED_OPERATOR,
    IN_PLACE_OPERATOR,
    KERNEL_DOMAIN,
    LOOP_OPERATOR,
    LOSS_OPERATOR,
    MATMUL_OPERATOR,
    OPERATOR,
    POSITION,
    REGION_OPERATOR,
)

OPSET, IR_VERSION = 18, 9
# The name prefix of nodes that only fix the order of others.
LEAF = "order"
# The dtype and shape of a value; the shape is None if it is not fixed.
TensorType = tuple[torch.dtype, Sequence[int | None] | None]


class ModelBuilder:
    """Collects the nodes of a model in the order in which they run."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._values: list[tuple[str, TensorType]] = []
        self._constants: list[onnx.TensorProto] = []
        self._shared: dict[Any, str] = {}
        self._count = 0

    @property
    def nodes(self) -> Sequence[onnx.NodeProto]:
        return self._nodes

    @property
    def output_names(self) -> list[str]:
        return [output.name for output in self._outputs]

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int | None]) -> str:
        self._inputs.append(_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: torch.dtype, shape: Sequence[int | None] | None) -> None:
        self._outputs.append(_info(name, dtype, shape))

    def node(self, operator: str, inputs: Sequence[str], name: str, domain: str = "", **attributes: Any) -> str:
        """Adds a node with one output and returns its name."""
        result = self._unique(name)
        title = f"{operator}_{result}"
        self._nodes.append(helper.make_node(operator, list(inputs), [result], name=title, domain=domain, **attributes))
        return result

    def region(self, index: int, inputs: Sequence[str], outputs: Sequence[TensorType], name: str) -> list[str]:
        """Adds a compiled region and returns the names of its outputs; the arguments are those of `torch_node`."""
        return self._kernel(REGION_OPERATOR, index, inputs, outputs, name)

    def matmul(self, index: int, inputs: Sequence[str], output: TensorType, name: str) -> str:
        """Adds a matmul and returns the name of its output; the arguments are those of `torch_node`."""
        return self._kernel(MATMUL_OPERATOR, index, inputs, [output], name)[0]

    def loop(self, index: int, inputs: Sequence[str], outputs: Sequence[TensorType], name: str) -> list[str]:
        """Adds a loop of a recurrent layer and returns the names of its outputs; as `region`."""
        return self._kernel(LOOP_OPERATOR, index, inputs, outputs, name)

    def loss(self, index: int, inputs: Sequence[str], outputs: Sequence[TensorType], name: str) -> list[str]:
        """Adds an output layer with its cross entropy and returns the names of its outputs; as `region`."""
        return self._kernel(LOSS_OPERATOR, index, inputs, outputs, name)

    def grouped_matmul(self, index: int, inputs: Sequence[str], output: TensorType, name: str) -> str:
        """Adds a matmul of groups of rows and returns the name of its output; as `region`."""
        return self._kernel(GROUPED_OPERATOR, index, inputs, [output], name)[0]

    def convolution(self, index: int, inputs: Sequence[str], output: TensorType, name: str) -> str:
        """Adds a convolution of images and returns the name of its output; as `region`."""
        return self._kernel(CONVOLUTION_OPERATOR, index, inputs, [output], name)[0]

    def _kernel(
        self, operator: str, index: int, inputs: Sequence[str], outputs: Sequence[TensorType], name: str
    ) -> list[str]:
        names = [self._unique(name) for _ in outputs]
        self._values += zip(names, outputs, strict=True)
        title, position = f"{operator.lower()}_{names[0]}", {POSITION: str(index)}
        node = helper.make_node(operator, list(inputs), names, name=title, domain=KERNEL_DOMAIN, **position)
        self._nodes.append(node)
        return names

    def torch_node(
        self, index: int, inputs: Sequence[str], outputs: Sequence[TensorType], name: str, is_in_place: bool = False
    ) -> list[str]:
        """Adds a torch node and returns the names of its outputs.

        Args:
            index: the position of the torch node in the phase.
            inputs: the names of its inputs.
            outputs: the types of its outputs, which ONNX can't infer.
            name: a prefix for the names of its outputs.
            is_in_place: whether the first output has the memory of the first input.
        """
        names = [self._unique(name) for _ in outputs]
        self._values += zip(names, outputs, strict=True)
        attributes = {"operator": "lit_ort::node", POSITION: str(index)}
        operator = IN_PLACE_OPERATOR if is_in_place else OPERATOR
        node = helper.make_node(operator, list(inputs), names, name=f"torch_{names[0]}", domain=DOMAIN, **attributes)
        self._nodes.append(node)
        return names

    def constant(self, array: np.ndarray) -> str:
        """Adds an initializer and returns its name; equal initializers are shared."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            name = self._shared[key] = self._unique("constant")
            self._constants.append(numpy_helper.from_array(array, name))
        return self._shared[key]

    def tensor(self, tensor: torch.Tensor) -> str:
        """Adds an initializer of any dtype and returns its name."""
        name = self._unique("constant")
        data = tensor.detach().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        self._constants.append(helper.make_tensor(name, ELEMENTS[tensor.dtype], list(tensor.shape), raw, raw=True))
        return name

    def build(self, name: str, keeps_order: bool, is_native: bool = False) -> onnx.ModelProto:
        """Return the model.

        Args:
            name: the name of its graph.
            keeps_order: whether the engine runs nodes in the order of the model.
            is_native: whether no node is a torch node, so that ONNX Runtime can plan the memory of all values.
        """
        if keeps_order or is_native:
            values = [_info(value, dtype, shape) for value, (dtype, shape) in self._values]
        else:
            # If the shape were known, ONNX Runtime would plan the result into memory that it reuses, and the result
            # would have to be copied there.
            values = [_info(value, dtype, None) for value, (dtype, _) in self._values]
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._constants, value_info=values)
        domains = {node.domain: 1 for node in self._nodes} | {"": OPSET}
        opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lit_ort")
        if not keeps_order and len(self._nodes) > 1:
            model.graph.node.extend(_leaves(model))
        return model

    def _unique(self, name: str) -> str:
        self._count += 1
        # Inputs have the names of FX nodes, which contain no dot.
        return f"{name}.{self._count}"


def _leaves(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Nodes that make ONNX Runtime run the other nodes in the order of the model.

    ONNX Runtime orders nodes by a reverse depth-first search that begins at the leaves of the graph, the last leaf
    first (Graph::ReverseDFSFrom of onnxruntime). Therefore each node gets a leaf, in reverse order. The leaf is a Size
    node, which takes a quarter of a microsecond and is not folded to a constant. There is no Size for bfloat16, so
    these values get a Shape node. A Shape is folded if the shape is known, and the node can then run later. This does
    not affect torch nodes, the only ones whose order matters, since their shapes are not in the model.
    """
    inferred = onnx.shape_inference.infer_shapes(model).graph
    bfloat16 = {
        value.name
        for value in (*inferred.value_info, *inferred.output)
        if value.type.tensor_type.elem_type == ELEMENTS[torch.bfloat16]
    }
    return [
        helper.make_node(
            "Shape" if node.output[0] in bfloat16 else "Size",
            [node.output[0]],
            [f"{node.output[0]}.{LEAF}"],
            name=f"{LEAF}_{node.name}",
        )
        for node in reversed(model.graph.node)
    ]


def _info(name: str, dtype: torch.dtype, shape: Sequence[int | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENTS[dtype], None if shape is None else list(shape))
