"""Private interfaces of onnxruntime: the pybind classes of the training build and its hook for torch operators."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch.utils.checkpoint

# Built by pybind without type information.
C: Any = importlib.import_module("onnxruntime.capi._pybind_state")


def _give_torch_its_checkpoint_back() -> None:
    """Importing onnxruntime puts functions of ORTModule's around it, at which Dynamo breaks graphs."""
    checkpoint: Any = torch.utils.checkpoint.checkpoint
    while checkpoint.__module__.startswith("onnxruntime."):
        checkpoint = inspect.getclosurevars(checkpoint).nonlocals["original_checkpoint"]
    torch.utils.checkpoint.checkpoint = checkpoint


_give_torch_its_checkpoint_back()

# pybind raises RuntimeError for C++ exceptions and these for failed statuses.
ORT_ERRORS: tuple[type[BaseException], ...] = (
    RuntimeError,
    C.EPFail,
    C.Fail,
    C.InvalidArgument,
    C.InvalidGraph,
    C.InvalidProtobuf,
    C.NotImplemented,
    C.RuntimeException,
)
CPU: Any = C.OrtDevice(C.OrtDevice.cpu(), C.OrtDevice.default_memory(), 0)


def run_of(session: Any) -> Any:
    """The method of an InferenceSession that takes and gives OrtValueVectors."""
    return session._sess.run_with_ortvaluevector
