"""The engine of onnxruntime's training build, whose ATen executor calls torch from inside a session.

Its ATen kernel calls two registered C functions: one reports which arguments are tensors, the other executes the
operator. Both are ctypes callbacks here, so that no extension has to be built. Tensors are passed as DLPack.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import onnxruntime
import torch

from lit_ort._compat import devices as torch_devices
from lit_ort._compat.held_signals import HeldSignals
from lit_ort._compat.onnxruntime import CPU, ORT_ERRORS, C, environment_of, run_of
from lit_ort._compat.torch import from_dlpack, to_dlpack
from lit_ort.errors import SessionError
from lit_ort.runtime.engines import training_interface
from lit_ort.runtime.engines.engine_interface import CHECK_THE_BATCH, FOR_A_REPORT, SMALLEST_MODEL, Model
from lit_ort.runtime.engines.node_callbacks import Serving, results_of
from lit_ort.runtime.engines.stock.library import Library
from lit_ort.runtime.nodes import RunState
from lit_ort.runtime.region_calls import why_no_kernels

if TYPE_CHECKING:
    from lit_ort.runtime.engines.native_sessions import NativeEngine

_ERROR_SEVERITY = 3

# The arena's first chunk is only reserved as address space; the system allocates its memory when it is first written
# to. Only the arena's list of parts allocates memory at once, a thirty-second of the chunk's size. Each later chunk is
# twice as large. Adjacent free parts are merged. A remainder of a part becomes a free part if it is larger than
# max_dead_bytes_per_chunk.
_ARENA = {"arena_extend_strategy": 0, "initial_chunk_size_bytes": 2**27, "max_dead_bytes_per_chunk": 2**16}

_FRESH, _USED = b"dltensor", b"used_dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_rename_capsule = ctypes.pythonapi.PyCapsule_SetName
_rename_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]


class TrainingEngine:
    """The engine of the packages onnxruntime-training and onnxruntime-training-cpu."""

    name = "training"
    keeps_order = True
    device_types: tuple[str, ...] = (torch_devices.CPU.type,)

    def __init__(self, version: str) -> None:
        self.version = version

    @property
    def native(self) -> NativeEngine | None:
        return self._native

    @functools.cached_property
    def _native(self) -> NativeEngine | None:
        """Creates sessions that call no Python; None if they aren't known to work with this version, system or CPU."""
        if not training_interface.is_available() or why_no_kernels() is not None:
            return None
        from lit_ort.runtime.engines.native_sessions import NativeEngine as Native  # loads LLVM

        _prepare_process()
        options = _quiet_options()
        environment = environment_of([onnxruntime.InferenceSession(SMALLEST_MODEL, options) for _ in range(2)])
        if environment is None:
            return None
        # The struct OrtEnv is the address of an environment.
        word = ctypes.c_uint64(environment)
        self._environment = word
        return Native(Library(training_interface.base_of(options)), ctypes.addressof(word), shares_arena=True)

    def session(self, model: Model, *, threads: int, allow_spinning: bool) -> _Session:
        return _Session(model, _create(model.data, threads, allow_spinning))


class _Session:
    def __init__(self, model: Model, session: onnxruntime.InferenceSession) -> None:
        self._model = model
        self._inputs, self._outputs = list(model.inputs), list(model.outputs)
        self._session = session
        self._run = run_of(self._session)
        self._devices = [CPU] * len(self._outputs)

    def run(self, tensors: Sequence[torch.Tensor], state: RunState) -> list[torch.Tensor]:
        fetched = C.OrtValueVector()
        with HeldSignals(), Serving(self._model, state):
            try:
                self._run(C.RunOptions(), self._inputs, _to_ort(tensors), self._outputs, fetched, self._devices)
            except ORT_ERRORS as error:
                raise SessionError(f"a run failed: {str(error).strip()}", remedy=CHECK_THE_BATCH) from error
        return _to_torch(fetched)


def _to_ort(tensors: Iterable[torch.Tensor]) -> Any:
    """Wrap CPU tensors as values that borrow the tensors' memory; only non-contiguous tensors are copied."""
    values = C.OrtValueVector()
    for tensor in tensors:
        data = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        is_bool = data.dtype == torch.bool
        # ONNX Runtime accepts booleans as bytes with a separate flag.
        values.push_back(to_dlpack(data.view(torch.uint8) if is_bool else data), is_bool)
    return values


def _to_torch(values: Any) -> list[torch.Tensor]:
    """Wrap values as tensors that share their memory; it returns to ONNX Runtime's arena with the last tensor."""
    if len(values) == 0:
        return []
    tensors = list(values.to_dlpacks(from_dlpack))
    for position in values.bool_tensor_indices():
        tensors[position] = tensors[position].view(torch.bool)
    return tensors


def _address(function: Any) -> str:
    return str(ctypes.cast(function, ctypes.c_void_p).value)


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_bool)
def _is_tensor_argument(operator: bytes, overload: bytes, index: int, is_input: bool) -> bool:
    return True


@ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
)
def _execute(operator: bytes, overload: bytes, input_count: int, inputs: Any, output_count: int, outputs: Any) -> None:
    tensors = [from_dlpack(_new_capsule(inputs[k], _FRESH, None)) for k in range(input_count)]
    # A missing result would crash the process.
    results = results_of(int(overload), tensors) or [torch.zeros(0) for _ in range(output_count)]
    for k in range(output_count):
        capsule = to_dlpack(results[k])
        outputs[k] = _capsule_pointer(capsule, _FRESH)
        # The session owns the tensor now.
        _rename_capsule(capsule, _USED)


@functools.cache
def _prepare_process() -> None:
    """Register the callbacks, and one arena for all sessions of the process, so that graphs of several shapes share
    their memory.
    """
    C.register_aten_op_executor(_address(_is_tensor_argument), _address(_execute))
    memory = C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, C.OrtMemType.DEFAULT)
    C.create_and_register_allocator(memory, C.OrtArenaCfg(_ARENA))


def _quiet_options() -> onnxruntime.SessionOptions:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = _ERROR_SEVERITY
    return settings


def _create(model: bytes, threads: int, allow_spinning: bool) -> onnxruntime.InferenceSession:
    _prepare_process()
    settings = _quiet_options()
    settings.add_session_config_entry("session.use_env_allocators", "1")
    settings.intra_op_num_threads = threads
    settings.enable_mem_pattern = False
    # The graph is already optimized; only constant folding remains for ONNX Runtime.
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    # Of the nodes that are ready, the one that the model lists first runs next.
    settings.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # With reuse, a value that is planned into the memory of a dead value would keep that memory allocated even if a
    # torch node returns its own memory; and a torch node's result can share the memory of its inputs.
    settings.enable_mem_reuse = False
    settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(allow_spinning)))
    try:
        return onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    except ORT_ERRORS as error:
        raise SessionError(
            f"ONNX Runtime rejects the model: {str(error).strip()}",
            remedy=FOR_A_REPORT,
        ) from error
