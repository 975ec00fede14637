"""What an engine is: it makes sessions of ONNX models that have torch nodes in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lit_ort._compat.devices import CPU
from lit_ort.runtime.nodes import NodeFunction, RunState

# A torch node in a model: its operator, and the attribute that holds its position among the model's torch nodes.
DOMAIN, OPERATOR, POSITION = "org.pytorch.aten", "ATen", "overload_name"
# What errors call the place in a node, given by its position, where an error was raised.
WhatFailed = Callable[[int, BaseException], str]
CHECK_THE_BATCH = "Check the batch against what the module takes (index ranges, shapes); eager says more."
FOR_A_REPORT = "fallback='warn' runs this graph in eager; dump_dir keeps the model for a report."


@dataclasses.dataclass(frozen=True)
class Model:
    """What a session is made of.

    Args:
        data: the serialized ONNX model.
        nodes: the functions of its torch nodes.
        what_failed: names the place of an error in a node.
        inputs, outputs: names, in the order tensors are given and wanted.
        device: where its torch nodes compute.
    """

    data: bytes
    nodes: Sequence[NodeFunction]
    what_failed: WhatFailed
    inputs: Sequence[str]
    outputs: Sequence[str]
    device: torch.device = CPU


class EngineSession(Protocol):
    """A model, ready to run on torch tensors."""

    def run(self, tensors: Sequence[torch.Tensor], state: RunState) -> list[torch.Tensor]:
        """One run: all outputs, in order.

        Raises:
            SessionError: a kernel refused its inputs, such as a label out of range; torch's own error is its cause.
        """
        ...


class Engine(Protocol):
    """A build of ONNX Runtime.

    Attributes:
        name: of `ORTOptions.engine`.
        version: of the package, such as `onnxruntime 1.24.1`.
        keeps_order: whether nodes run in the order in which a model lists them.
        device_types: of the devices whose tensors it takes.
    """

    name: str
    version: str
    keeps_order: bool
    device_types: tuple[str, ...]

    def session(self, model: Model, *, threads: int, allow_spinning: bool) -> EngineSession:
        """Makes a session.

        Args:
            threads: of one session's operators.
            allow_spinning: idle threads spin instead of sleeping.

        Raises:
            SessionError: ONNX Runtime has no kernel for an operator, or refuses the model.
        """
        ...
