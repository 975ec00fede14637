"""The interface of engines, which create sessions of ONNX models that have torch nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from lit_ort._compat.devices import CPU
from lit_ort.runtime.nodes import NodeFunction, RunState

if TYPE_CHECKING:
    from lit_ort.runtime.engines.native_sessions import NativeEngine

# A torch node in a model: its domain, its operator, and the attribute with its position among the model's torch nodes.
DOMAIN, OPERATOR, POSITION = "org.pytorch.aten", "ATen", "overload_name"
# A torch node of a native session whose first output has the memory of its first input.
IN_PLACE_OPERATOR = "ATenInPlace"
# A compiled region, a matmul, a loop of a recurrent layer, an output layer with its cross entropy, a matmul of groups
# of rows, and a convolution of images in a model: their domain and operators; the attribute with the position among
# those of one kind is the same.
KERNEL_DOMAIN, REGION_OPERATOR, MATMUL_OPERATOR, LOOP_OPERATOR = "lit_ort", "Region", "Matmul", "RecurrentLoop"
LOSS_OPERATOR, GROUPED_OPERATOR, CONVOLUTION_OPERATOR = "LinearCrossEntropy", "GroupedMatmul", "ImageConvolution"
KERNEL_OPERATORS = (
    *(REGION_OPERATOR, MATMUL_OPERATOR, LOOP_OPERATOR, LOSS_OPERATOR, GROUPED_OPERATOR),
    CONVOLUTION_OPERATOR,
)
# The domain of the operators that ONNX Runtime adds to the standard.
MICROSOFT = "com.microsoft"
# A model of one Identity node.
SMALLEST_MODEL = (
    b'\x08\t:+\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\t\n\x01x\x12\x04\n\x02\x08\x01'
    b"b\t\n\x01y\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)
# Maps a node's position and the error that it raised to the location of the error, for messages; to None if the program
# itself raised it, as in eager.
LocationOf = Callable[[int, BaseException], str | None]
CHECK_THE_BATCH = "Check the batch against what the module accepts (index ranges, shapes); eager reports more."
FOR_A_REPORT = "fallback='warn' runs this graph in eager; dump_dir saves the model for a bug report."


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with everything that a session needs.

    Args:
        data: the serialized ONNX model.
        nodes: the functions of its torch nodes.
        location_of: returns the location of an error in a node, for messages; None for an error of the program's own.
        inputs, outputs: their names, in the order in which a run receives and returns the tensors.
        device: the device on which its torch nodes compute.
    """

    data: bytes
    nodes: Sequence[NodeFunction]
    location_of: LocationOf
    inputs: Sequence[str]
    outputs: Sequence[str]
    device: torch.device = CPU


class EngineSession(Protocol):
    """A session that runs a model on torch tensors."""

    def run(self, tensors: Sequence[torch.Tensor], state: RunState) -> list[torch.Tensor]:
        """Runs the model once and returns all outputs, in order.

        Raises:
            SessionError: a kernel rejected its inputs, such as a label out of range; torch's own error is its cause.
        """
        ...


class Engine(Protocol):
    """A build of ONNX Runtime.

    Attributes:
        name: its value of `ORTOptions.engine`.
        version: the package and its version, such as `onnxruntime 1.24.1`.
        keeps_order: whether nodes run in the order in which a model lists them.
        device_types: the types of the devices whose tensors it accepts.
    """

    name: str
    version: str
    keeps_order: bool
    device_types: tuple[str, ...]

    @property
    def native(self) -> NativeEngine | None:
        """Creates sessions that call no Python; None if there are none with this build, system or CPU."""
        ...

    def session(self, model: Model, *, threads: int, allow_spinning: bool) -> EngineSession:
        """Create a session.

        Args:
            model: the model.
            threads: the number of intra-op threads of the session.
            allow_spinning: whether idle threads spin instead of sleeping.

        Raises:
            SessionError: ONNX Runtime has no kernel for an operator, or rejects the model.
        """
        ...
