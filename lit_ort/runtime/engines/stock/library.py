"""ONNX Runtime's C interface through ctypes.

The shared library exports one function, OrtGetApiBase, which returns access to a table of functions. New versions only
append to the table, so a function's index is valid for all later versions (onnxruntime_c_api.h).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from lit_ort.errors import EngineError

# Version 18 (onnxruntime 1.18) has all functions needed; from 24 on, a tensor's shape needs one call instead of four.
_MIN_VERSION, SHAPES_IN_ONE_CALL = 18, 24
_PATTERNS = {"win32": "onnxruntime.dll", "darwin": "libonnxruntime*.dylib"}
_FAIL = 1

_P, _S = c_void_p, c_size_t
# The index in the table and the types of the arguments; all functions return an OrtStatus, null for success.
_FUNCTIONS: dict[str, tuple[int, list[Any]]] = {
    "CreateEnv": (3, [c_int, c_char_p, _P]),
    "CreateSessionFromArray": (8, [_P, c_char_p, _S, _P, _P]),
    "Run": (9, [_P, _P, _P, _P, _S, _P, _S, _P]),
    "CreateSessionOptions": (10, [_P]),
    "DisableMemPattern": (17, [_P]),
    "SetSessionLogSeverityLevel": (22, [_P, c_int]),
    "SetSessionGraphOptimizationLevel": (23, [_P, c_int]),
    "SetIntraOpNumThreads": (24, [_P, c_int]),
    "CreateCustomOpDomain": (26, [c_char_p, _P]),
    "CustomOpDomain_Add": (27, [_P, _P]),
    "AddCustomOpDomain": (28, [_P, _P]),
    "CreateTensorWithDataAsOrtValue": (49, [_P, _P, _S, _P, _S, c_int, _P]),
    "GetTensorMutableData": (51, [_P, _P]),
    "CastTypeInfoToTensorInfo": (55, [_P, _P]),
    "GetTensorElementType": (60, [_P, _P]),
    "GetDimensionsCount": (61, [_P, _P]),
    "GetDimensions": (62, [_P, _P, _S]),
    "GetTensorTypeAndShape": (65, [_P, _P]),
    "CreateCpuMemoryInfo": (69, [c_int, c_int, _P]),
    "KernelInfoGetAttribute_string": (87, [_P, c_char_p, _P, _P]),
    "KernelContext_GetInput": (90, [_P, _S, _P]),
    "KernelContext_GetOutput": (91, [_P, _S, _P, _S, _P]),
    "AddSessionConfigEntry": (130, [_P, c_char_p, c_char_p]),
    "RegisterAllocator": (176, [_P, _P]),
    "KernelInfo_GetInputCount": (230, [_P, _P]),
    "KernelInfo_GetOutputCount": (231, [_P, _P]),
    "KernelInfo_GetInputName": (232, [_P, _S, _P, _P]),
    "KernelInfo_GetInputTypeInfo": (234, [_P, _S, _P]),
    "KernelInfo_GetOutputTypeInfo": (235, [_P, _S, _P]),
}
# Functions that machine code calls.
_OTHER_FUNCTIONS = {"KernelContext_ParallelFor": 274}
_SHAPE_IN_ONE_CALL = (414, [_P, _P, _P, _P])
_RELEASES = {
    "ReleaseSession": 95,
    "ReleaseValue": 96,
    "ReleaseTypeInfo": 98,
    "ReleaseTensorTypeAndShapeInfo": 99,
    "ReleaseSessionOptions": 100,
}
# These functions can run long, so they release the GIL; callbacks acquire it again. All other functions are called with
# the GIL held, which is faster and prevents thread switches.
_WITHOUT_LOCK = ("Run", "CreateSessionFromArray", "ReleaseSession")

Raw = Callable[..., "int | None"]


class Library:
    """The functions of a library, by name.

    Args:
        base: the address of the struct OrtApiBase.

    Attributes:
        version: such as 1.24.1.
        raw: functions that return the address of a status; for frequent calls, which then need only a comparison.
        releases: functions that release what a pointer refers to.
        shape_of: a function of an OrtValue and of pointers to which it writes element type, shape and rank; None before
            version 1.24.

    Raises:
        EngineError: the version is too old.
    """

    def __init__(self, base: int) -> None:
        get_table, get_version = (_P * 2).from_address(base)
        self.version: str = ctypes.CFUNCTYPE(c_char_p)(get_version)().decode()
        number = min(SHAPES_IN_ONE_CALL, int(self.version.split(".")[1]))
        table = ctypes.CFUNCTYPE(_P, c_uint32)(get_table)(number) if number >= _MIN_VERSION else None
        if not table:
            raise EngineError(
                f"onnxruntime {self.version} is older than 1.{_MIN_VERSION}, whose C interface is needed. Install a "
                "newer version: pip install --upgrade onnxruntime"
            )
        entries = (_P * (1 + _SHAPE_IN_ONE_CALL[0])).from_address(table)
        indices = {name: index for name, (index, _) in _FUNCTIONS.items()} | _OTHER_FUNCTIONS | _RELEASES
        self._addresses = {name: entries[index] for name, index in indices.items()}
        self._message = ctypes.PYFUNCTYPE(c_char_p, _P)(entries[2])
        self._status = ctypes.PYFUNCTYPE(_P, c_int, c_char_p)(entries[0])
        self._release_status = ctypes.PYFUNCTYPE(None, _P)(entries[93])
        self.raw: dict[str, Raw] = {
            name: _factory(name)(_P, *arguments)(entries[index]) for name, (index, arguments) in _FUNCTIONS.items()
        }
        self.releases = {name: _factory(name)(None, _P)(entries[index]) for name, index in _RELEASES.items()}
        self.shape_of: Raw | None = None
        if number >= SHAPES_IN_ONE_CALL:
            self.shape_of = ctypes.PYFUNCTYPE(_P, *_SHAPE_IN_ONE_CALL[1])(entries[_SHAPE_IN_ONE_CALL[0]])

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function.

        Raises:
            EngineError: the function returned a status; the error has the status's message.
        """
        self.check(self.raw[name](*arguments))

    def address(self, name: str) -> int:
        """The address of a function, for machine code that calls it."""
        address = self._addresses[name]
        assert address is not None, name
        return address

    def new(self, name: str, *arguments: Any) -> int:
        """Calls a function and returns the pointer that it writes into its last argument."""
        result = _P()
        self.call(name, *arguments, byref(result))
        assert result.value is not None
        return result.value

    def release(self, name: str, pointer: int) -> None:
        self.releases[name](pointer)

    def check(self, status: int | None) -> None:
        """Raises EngineError for a status that is not null."""
        if status:
            message = self._message(status).decode(errors="replace")
            self._release_status(status)
            raise EngineError(message)

    def failed(self, message: str) -> int:
        """A new status of a failure, which ONNX Runtime then owns."""
        return self._status(_FAIL, message.encode())


def _factory(name: str) -> Any:
    return ctypes.CFUNCTYPE if name in _WITHOUT_LOCK else ctypes.PYFUNCTYPE


def base_in(path: Path) -> int:
    """The address of the struct OrtApiBase of a shared library.

    Raises:
        EngineError: the file is not a library of ONNX Runtime.
    """
    try:
        get_base = ctypes.CDLL(str(path)).OrtGetApiBase
    except (OSError, AttributeError) as error:
        raise EngineError(
            f"{path} can't be loaded as ONNX Runtime's library: {error}. Reinstall it: pip install "
            "--force-reinstall onnxruntime"
        ) from error
    get_base.restype, get_base.argtypes = _P, []
    return get_base()


def library_in(folder: Path) -> Path | None:
    """The shared library in the folder of an installed package, or None."""
    paths = sorted((folder / "capi").glob(_PATTERNS.get(sys.platform, "libonnxruntime.so*")))
    return paths[0] if paths else None
