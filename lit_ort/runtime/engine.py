"""The pybind classes of ONNX Runtime's training build, and its manners: errors and log lines."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

# Built by pybind without type information.
C: Any = importlib.import_module("onnxruntime.capi._pybind_state")

if not hasattr(C, "GradientGraphBuilder"):
    raise ImportError(
        "The installed onnxruntime is an inference build, and training needs onnxruntime-training-cpu. "
        "Both install the module onnxruntime, so: pip uninstall onnxruntime onnxruntime-training-cpu; "
        "pip install onnxruntime-training-cpu==1.19.2"
    )


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
WARNING_SEVERITY, ERROR_SEVERITY = 2, 3


@contextmanager
def quiet_onnxruntime() -> Iterator[None]:
    """Errors only, for as long as graphs are built; then onnxruntime's default, warnings, again.

    The graph builders log to the default logger, whose severity can be set but not read.
    """
    C.set_default_logger_severity(ERROR_SEVERITY)
    try:
        yield
    finally:
        C.set_default_logger_severity(WARNING_SEVERITY)
