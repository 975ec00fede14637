"""Calls torch from inside a session: the ATen nodes of a graph reach Python here.

onnxruntime-training's ATen kernel calls two C functions that it was given, one that tells tensor arguments from others
and one that executes. Both are ctypes callbacks here, so that no extension has to be built. Tensors travel as DLPack.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch._C import _from_dlpack, _to_dlpack

from lit_ort.errors import SessionError
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.engine import C

DOMAIN = "org.pytorch.aten"
NAMESPACE = "lit_ort::"
CHECK_THE_BATCH = "Check the batch against what the module takes (index ranges, shapes); eager says more."

_FRESH, _USED = b"dltensor", b"used_dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_rename_capsule = ctypes.pythonapi.PyCapsule_SetName
_rename_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class Kernel:
    """A torch function that a node can call.

    Args:
        name: unique; the node's `operator` attribute is `lit_ort::<name>`.
        run: from the pool and the node's inputs to its results, in memory of the pool where they are large; a node's
            `overload_name`, where it has one, comes before them.
        gradients: for each input that has a gradient, the output that holds it, for a gradient of one of output 0; the
            other outputs are not for the graph to read.
        backward: how its gradients are computed where it doesn't hold them, or None.
    """

    name: str
    run: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    gradients: Mapping[int, int] = field(default_factory=dict)
    backward: Backward | None = None

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The inputs that have a gradient."""
        return self.backward.wants if self.backward is not None else tuple(self.gradients)


@dataclass(frozen=True)
class Backward:
    """The kernel that computes the gradients of another one's inputs.

    Args:
        kernel: its name.
        inputs: what it takes, in the gradient builder's words: `GO(0)` is the gradient of output 0, `I(k)` and `O(k)`
            are inputs and outputs of the forward.
        wants: inputs of the forward that its results are the gradients of, from 0 on without a gap.
    """

    kernel: str
    inputs: tuple[str, ...]
    wants: tuple[int, ...]


class _Run(threading.local):
    """What the callbacks of this thread need to know, and what they have to tell."""

    pool: BufferPool | None = None
    kernels: Mapping[str, Kernel] = MappingProxyType({})
    failure: tuple[str, BaseException] | None = None

    def take_failure(self) -> tuple[str, BaseException] | None:
        failure, self.failure = self.failure, None
        return failure


_current = _Run()


@contextmanager
def kernels_available(kernels: Mapping[str, Kernel], pool: BufferPool) -> Iterator[None]:
    """Serves the ATen nodes of one run on this thread, and raises what a kernel raised.

    Raises:
        SessionError: a kernel raised, with its error as the cause; ctypes would swallow it.
    """
    previous = (_current.pool, _current.kernels)
    _current.pool, _current.kernels = pool, kernels
    # The graph says in what each kernel computes, whatever autocast its caller runs under.
    plain = torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
    try:
        with plain:
            yield
    finally:
        _current.pool, _current.kernels = previous
        failure = _current.take_failure()
        if failure is not None:
            operator, error = failure
            raise SessionError(f"the kernel {operator} failed: {error}", remedy=CHECK_THE_BATCH) from error


@functools.cache
def register_executor() -> None:
    """Tells ONNX Runtime where to find torch, once for the process."""
    C.register_aten_op_executor(_address(_is_tensor_argument), _address(_execute))


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
    tensors = [_from_dlpack(_new_capsule(inputs[k], _FRESH, None)) for k in range(input_count)]
    results = _call(operator.decode(), overload.decode(), tensors, output_count)
    for k, result in enumerate(results):
        capsule = _to_dlpack(result)
        outputs[k] = _capsule_pointer(capsule, _FRESH)
        # The session owns the tensor now.
        _rename_capsule(capsule, _USED)


def _call(operator: str, overload: str, tensors: Sequence[torch.Tensor], output_count: int) -> list[torch.Tensor]:
    """The kernel's results, or empty tensors after a failure: a missing one would crash the process."""
    if _current.failure is None:
        try:
            assert _current.pool is not None
            kernel = _current.kernels[operator.removeprefix(NAMESPACE)]
            with torch.no_grad():
                described = (overload,) if overload else ()
                results = kernel.run(*described, _current.pool, *tensors)
            results = (results,) if isinstance(results, torch.Tensor) else results
            assert len(results) == output_count
            return [result.contiguous() for result in results]
        except BaseException as error:  # noqa: B036 - nothing may be raised into C; kernels_available raises it
            _current.failure = (operator, error)
    return [torch.zeros(0) for _ in range(output_count)]
