"""Private interfaces of onnxruntime: the pybind classes of the training build and its hook for torch operators."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch.utils.checkpoint

# A pybind module, without type information.
C: Any = importlib.import_module("onnxruntime.capi._pybind_state")


def _restore_checkpoint() -> None:
    """Restores torch's `checkpoint`. Importing onnxruntime wraps it in functions at which Dynamo breaks the graph."""
    checkpoint: Any = torch.utils.checkpoint.checkpoint
    while checkpoint.__module__.startswith("onnxruntime."):
        checkpoint = inspect.getclosurevars(checkpoint).nonlocals["original_checkpoint"]
    torch.utils.checkpoint.checkpoint = checkpoint


_restore_checkpoint()

# pybind raises RuntimeError for C++ exceptions, and the other classes for failed statuses.
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
    """The method of an InferenceSession whose inputs and outputs are OrtValueVectors."""
    return session._sess.run_with_ortvaluevector
