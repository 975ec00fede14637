"""The engine of stock onnxruntime, and its sessions."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import weakref
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_int64, c_uint64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_ort._compat.devices import CPU
from lit_ort._compat.held_signals import HeldSignals
from lit_ort.errors import EngineError, SessionError
from lit_ort.runtime.elements import DTYPES, ELEMENTS
from lit_ort.runtime.engines.engine_interface import CHECK_THE_BATCH, FOR_A_REPORT, Model
from lit_ort.runtime.engines.node_callbacks import Serving
from lit_ort.runtime.engines.stock.dlpack_views import MOST_DIMENSIONS
from lit_ort.runtime.engines.stock.library import Library, base_in
from lit_ort.runtime.engines.stock.torch_allocator import SessionAllocator
from lit_ort.runtime.engines.stock.torch_node_operator import TorchOperator, read_shape
from lit_ort.runtime.nodes import RunState
from lit_ort.runtime.region_calls import why_no_kernels

if TYPE_CHECKING:
    from lit_ort.runtime.engines.native_sessions import NativeEngine

_ERRORS_ONLY = 3
# The graph is already optimized; only constant folding remains for ONNX Runtime.
_BASIC = 1


class StockEngine:
    """The engine of the package onnxruntime.

    Args:
        version: the package and its version.
        path: the path of its shared library.
    """

    name = "stock"
    keeps_order = False
    device_types: tuple[str, ...] = (CPU.type, "cuda")

    def __init__(self, version: str, path: Path) -> None:
        self.version = version
        self._library = Library(base_in(path))
        self._environment = self._library.new("CreateEnv", _ERRORS_ONLY, b"lit_ort")
        self._allocator = SessionAllocator(self._library, self._environment)
        self._operator = TorchOperator(self._library, self._allocator)

    @property
    def native(self) -> NativeEngine | None:
        return self._native

    @functools.cached_property
    def _native(self) -> NativeEngine | None:
        """Creates sessions that call no Python; None if the CPU has no regions."""
        if why_no_kernels() is not None:
            return None
        from lit_ort.runtime.engines.native_sessions import NativeEngine as Native  # loads LLVM

        return Native(self._library, self._environment, shares_arena=False)

    def session(self, model: Model, *, threads: int, allow_spinning: bool) -> _Session:
        options = self._options(threads, allow_spinning)
        kernels: list[int] = []
        try:
            with self._operator.creating(model.inputs, model.device) as kernels:
                session = self._library.new(
                    "CreateSessionFromArray", self._environment, model.data, len(model.data), options
                )
        except EngineError as error:
            self._operator.drop(kernels)
            raise SessionError(f"ONNX Runtime rejects the model: {str(error).strip()}", remedy=FOR_A_REPORT) from error
        finally:
            self._library.release("ReleaseSessionOptions", options)
        resources = _Resources(self._library, session, self._operator, kernels)
        return _Session(self._library, self._allocator, self._operator, resources, model)

    def _options(self, threads: int, allow_spinning: bool) -> int:
        library = self._library
        options = library.new("CreateSessionOptions")
        library.call("SetIntraOpNumThreads", options, threads)
        library.call("SetSessionGraphOptimizationLevel", options, _BASIC)
        library.call("SetSessionLogSeverityLevel", options, _ERRORS_ONLY)
        library.call("DisableMemPattern", options)
        entries = {"session.use_env_allocators": "1", "session.intra_op.allow_spinning": str(int(allow_spinning))}
        for key, value in entries.items():
            library.call("AddSessionConfigEntry", options, key.encode(), value.encode())
        library.call("AddCustomOpDomain", options, self._operator.domain)
        return options


class _Resources:
    """A session in C with its kernels and input values; a call releases them."""

    def __init__(self, library: Library, session: int, operator: TorchOperator, kernels: Sequence[int]) -> None:
        self.session = session
        self.feeds: list[_Feed] = []
        self._library, self._operator, self._kernels = library, operator, kernels

    def __call__(self) -> None:
        self._library.release("ReleaseSession", self.session)
        self._operator.drop(self._kernels)
        for feed in self.feeds:
            feed.close()


class _Session:
    def __init__(
        self,
        library: Library,
        allocator: SessionAllocator,
        operator: TorchOperator,
        resources: _Resources,
        model: Model,
    ) -> None:
        self._library, self._allocator, self._operator = library, allocator, operator
        self._session = resources.session
        self._model = model
        self._input_names, self._output_names = _strings(model.inputs), _strings(model.outputs)
        self._feeds = resources.feeds = [_Feed(library, allocator.info) for _ in model.inputs]
        self._lock = threading.Lock()
        weakref.finalize(self, resources)

    def run(self, tensors: Sequence[torch.Tensor], state: RunState) -> list[torch.Tensor]:
        is_locked = self._lock.acquire(blocking=False)
        feeds = self._feeds if is_locked else [_Feed(self._library, self._allocator.info) for _ in tensors]
        try:
            return self._run(feeds, tensors, state)
        finally:
            if is_locked:
                self._lock.release()
            else:
                for feed in feeds:
                    feed.close()

    def _run(self, feeds: Sequence[_Feed], tensors: Sequence[torch.Tensor], state: RunState) -> list[torch.Tensor]:
        input_count, output_count = len(tensors), len(self._output_names)
        # Copies must stay alive during the run.
        contiguous = [tensor if tensor.is_contiguous() else tensor.detach().contiguous() for tensor in tensors]
        addresses = (feed.value_of(tensor) for feed, tensor in zip(feeds, contiguous, strict=True))
        inputs = (c_uint64 * input_count)(*addresses)
        outputs = (c_uint64 * output_count)()
        with HeldSignals(), Serving(self._model, state), self._operator.running(contiguous):
            try:
                self._library.call(
                    "Run",
                    self._session,
                    None,
                    self._input_names,
                    inputs,
                    input_count,
                    self._output_names,
                    output_count,
                    outputs,
                )
            except EngineError as error:
                raise SessionError(f"a run failed: {str(error).strip()}", remedy=CHECK_THE_BATCH) from error
        return [self._tensor_of(value, state) for value in outputs]

    def _tensor_of(self, value: int, state: RunState) -> torch.Tensor:
        """Convert an output value to a tensor and release the value."""
        library = self._library
        address = c_uint64()
        library.call("GetTensorMutableData", value, byref(address))
        shape, dtype = self._type_of(value)
        memory = self._allocator.tensor_at(address.value, state)
        if memory is None:
            # The memory belongs to an input or to a constant of the session.
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                ctypes.memmove(tensor.data_ptr(), address.value, tensor.nbytes)
        elif memory.dtype == dtype and list(memory.shape) == shape:
            tensor = memory
        else:
            size = math.prod(shape) * dtype.itemsize
            tensor = memory.view(-1).view(torch.uint8)[:size].view(dtype).view(shape)
        library.release("ReleaseValue", value)
        return tensor

    def _type_of(self, value: int) -> tuple[list[int], torch.dtype]:
        """The shape and dtype of a value."""
        element, rank, sizes = c_int(), c_uint64(), (c_int64 * MOST_DIMENSIONS)()
        if self._library.shape_of is None:
            read_shape(self._library, value, element, sizes, rank)
        else:
            address = c_uint64()
            self._library.check(self._library.shape_of(value, byref(element), byref(address), byref(rank)))
            sizes = (c_int64 * rank.value).from_address(address.value) if rank.value else ()
        return list(sizes[: rank.value]), DTYPES[element.value]


def _strings(names: Sequence[str]) -> Any:
    """A C array of strings."""
    return (c_char_p * len(names))(*(name.encode() for name in names))


class _Feed:
    """An input: an OrtValue over the last tensor. It is kept for the next run if tensor and memory are the same."""

    __slots__ = ("_dtype", "_info", "_library", "_pointer", "_shape", "_value")

    def __init__(self, library: Library, info: int) -> None:
        self._library, self._info = library, info
        self._pointer, self._value = -1, 0
        self._shape: torch.Size | None = None
        self._dtype: torch.dtype | None = None

    def value_of(self, tensor: torch.Tensor) -> int:
        """The address of an OrtValue that borrows the tensor's memory."""
        pointer, shape, dtype = tensor.data_ptr(), tensor.shape, tensor.dtype
        if pointer != self._pointer or shape != self._shape or dtype != self._dtype:
            self.close()
            dims = (c_int64 * len(shape))(*shape)
            arguments = (self._info, pointer, tensor.nbytes, dims, len(shape), ELEMENTS[dtype])
            self._value = self._library.new("CreateTensorWithDataAsOrtValue", *arguments)
            self._pointer, self._shape, self._dtype = pointer, shape, dtype
        return self._value

    def close(self) -> None:
        if self._value:
            self._library.release("ReleaseValue", self._value)
            self._value, self._pointer = 0, -1
