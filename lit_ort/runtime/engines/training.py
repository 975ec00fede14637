"""onnxruntime's training build, whose ATen executor calls torch from inside a session.

Its ATen kernel calls two C functions that it was given, one that tells tensor arguments from others and one that
executes. Both are ctypes callbacks here, so that no extension has to be built. Tensors travel as DLPack.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import onnxruntime
import torch

from lit_ort._compat.onnxruntime import CPU, ORT_ERRORS, C, run_of
from lit_ort._compat.torch import from_dlpack, to_dlpack
from lit_ort.errors import SessionError
from lit_ort.runtime.nodes import NodeFunction, RunState
from lit_ort.runtime.tensors import to_ort, to_torch

WhatFailed = Callable[[int, BaseException], str]
DOMAIN = "org.pytorch.aten"
OPERATOR = "lit_ort::node"
CHECK_THE_BATCH = "Check the batch against what the module takes (index ranges, shapes); eager says more."
_ERROR_SEVERITY = 3

# The arena's first chunk is address space, whose memory is taken when it is first written to, but for a list of its
# parts, which takes a thirty-second of its size at once; later chunks are twice as large each. Parts that are free
# become one again, and anything larger than the other figure that a value leaves over of a part is free.
_ARENA = {"arena_extend_strategy": 0, "initial_chunk_size_bytes": 2**26, "max_dead_bytes_per_chunk": 2**16}

_FRESH, _USED = b"dltensor", b"used_dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_rename_capsule = ctypes.pythonapi.PyCapsule_SetName
_rename_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]


class TrainingEngineSession:
    """A model, ready to run on torch tensors.

    Args:
        model: serialized, at ONNX Runtime's opset and IR version.
        nodes: the functions of its torch nodes.
        what_failed: what errors call the place in a node, given by its position, where an error was raised.
        inputs, outputs: names, in the order tensors are given and wanted.
        threads: of one session's operators.
        allow_spinning: idle threads spin instead of sleeping.

    Raises:
        SessionError: ONNX Runtime has no kernel for an operator, or refuses the model.
    """

    def __init__(
        self,
        model: bytes,
        nodes: Sequence[NodeFunction],
        what_failed: WhatFailed,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        threads: int,
        allow_spinning: bool,
    ) -> None:
        self._nodes, self._what_failed = nodes, what_failed
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._session = _create(model, threads, allow_spinning)
        self._run = run_of(self._session)
        self._devices = [CPU] * len(self._outputs)

    def run(self, tensors: Sequence[torch.Tensor], state: RunState) -> list[torch.Tensor]:
        """One run: all outputs, in order.

        Raises:
            SessionError: a kernel refused its inputs, such as a label out of range; torch's own error is its cause.
        """
        fetched = C.OrtValueVector()
        with _serving(self._nodes, self._what_failed, state):
            try:
                self._run(C.RunOptions(), self._inputs, to_ort(tensors), self._outputs, fetched, self._devices)
            except ORT_ERRORS as error:
                raise SessionError(f"a run failed: {str(error).strip()}", remedy=CHECK_THE_BATCH) from error
        return to_torch(fetched)


class _Current(threading.local):
    """What the callbacks of this thread need to know, and what they have to tell."""

    nodes: Sequence[NodeFunction] = ()
    what_failed: WhatFailed | None = None
    state: RunState | None = None
    failure: tuple[str, BaseException] | None = None


_current = _Current()


@contextmanager
def _serving(nodes: Sequence[NodeFunction], what_failed: WhatFailed, state: RunState) -> Iterator[None]:
    """Serves the torch nodes of one run on this thread, and raises what a node raised.

    Raises:
        SessionError: a node raised, with its error as the cause; ctypes would swallow it. What is no Exception, such as
            KeyboardInterrupt, passes through unchanged.
    """
    previous = (_current.nodes, _current.what_failed, _current.state)
    _current.nodes, _current.what_failed, _current.state = nodes, what_failed, state
    # The graph says in what each node computes, whatever autocast its caller runs under.
    plain = torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
    try:
        with plain, torch.no_grad():
            yield
    finally:
        _current.nodes, _current.what_failed, _current.state = previous
        failure, _current.failure = _current.failure, None
        if failure is not None:
            label, error = failure
            if not isinstance(error, Exception):
                raise error
            raise SessionError(f"{label} failed: {str(error).rstrip('. ')}", remedy=CHECK_THE_BATCH) from error


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
    results = _results_of(int(overload), tensors, output_count)
    for k in range(output_count):
        capsule = to_dlpack(results[k])
        outputs[k] = _capsule_pointer(capsule, _FRESH)
        # The session owns the tensor now.
        _rename_capsule(capsule, _USED)


def _results_of(index: int, tensors: Sequence[torch.Tensor], output_count: int) -> Sequence[torch.Tensor]:
    """A node's results, or empty tensors after a failure: a missing one would crash the process."""
    if _current.failure is None:
        try:
            return _current.nodes[index](_current.state, *tensors)
        except BaseException as error:  # noqa: B036 - nothing may be raised into C; _serving raises it
            assert _current.what_failed is not None
            _current.failure = (_current.what_failed(index, error), error)
    return [torch.zeros(0) for _ in range(output_count)]


@functools.cache
def _prepare_process() -> None:
    """Tells ONNX Runtime where to find torch, and gives the process's sessions one arena: several shapes then don't
    each keep memory of their own.
    """
    C.register_aten_op_executor(_address(_is_tensor_argument), _address(_execute))
    memory = C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, C.OrtMemType.DEFAULT)
    C.create_and_register_allocator(memory, C.OrtArenaCfg(_ARENA))


def _create(model: bytes, threads: int, allow_spinning: bool) -> onnxruntime.InferenceSession:
    _prepare_process()
    settings = onnxruntime.SessionOptions()
    settings.add_session_config_entry("session.use_env_allocators", "1")
    settings.log_severity_level = _ERROR_SEVERITY
    settings.intra_op_num_threads = threads
    settings.enable_mem_pattern = False
    # The graph is optimized before it gets here; what remains for ONNX Runtime is folding constants.
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    # As the model lists its nodes: of those that can run, the first one.
    settings.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # A value that is planned into the memory of a dead one keeps that memory even where a torch node brings its own;
    # and a torch node's result may lie in the memory of what it was given.
    settings.enable_mem_reuse = False
    settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(allow_spinning)))
    try:
        return onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    except ORT_ERRORS as error:
        raise SessionError(
            f"ONNX Runtime refuses the model: {str(error).strip()}",
            remedy="fallback='warn' runs this graph in eager; dump_dir keeps the model for a report.",
        ) from error
