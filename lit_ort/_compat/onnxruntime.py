"""Private interfaces of onnxruntime: the pybind classes of the training build."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

# A pybind module, without type information.
C: Any = importlib.import_module("onnxruntime.capi._pybind_state")


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


# The only version whose memory layout `environment_of` knows, and the last one of the training build.
_KNOWN_VERSION = "1.19.2"
# Of pybind's object: its header, then the address of a PyInferenceSession; of that: its virtual table, a shared pointer
# to the environment, which is the environment and its count, and the session.
_OBJECT_HEADER = object.__basicsize__
_TABLE, _ENVIRONMENT, _COUNT, _SESSION = range(4)


def environment_of(sessions: Sequence[Any]) -> int | None:
    """The address of the environment of all sessions of the training build; None if it isn't where it is expected.

    The C interface creates no environment besides the one that the build creates when it is imported.

    Args:
        sessions: two different InferenceSessions, by which the layout is checked.
    """
    if onnxruntime_version() != _KNOWN_VERSION:
        return None
    first, second = (_words_of(session._sess) for session in sessions)
    shared = (_TABLE, _ENVIRONMENT, _COUNT)
    is_known = all(first[k] == second[k] != 0 for k in shared) and 0 != first[_SESSION] != second[_SESSION] != 0
    return first[_ENVIRONMENT] if is_known else None


def onnxruntime_version() -> str:
    """The version of the imported package."""
    return str(importlib.import_module("onnxruntime").__version__)


def _words_of(instance: Any) -> list[int]:
    address = ctypes.c_uint64.from_address(id(instance) + _OBJECT_HEADER).value
    return list((ctypes.c_uint64 * 4).from_address(address))


def run_of(session: Any) -> Any:
    """The method of an InferenceSession whose inputs and outputs are OrtValueVectors."""
    return session._sess.run_with_ortvaluevector
