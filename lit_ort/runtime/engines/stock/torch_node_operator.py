"""The custom operator that implements all torch nodes of the process's sessions (OrtCustomOp, onnxruntime_c_api.h)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from ctypes import POINTER, byref, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import torch

from lit_ort._compat.devices import is_cpu
from lit_ort.errors import EngineError
from lit_ort.runtime.buffers import SMALL_BYTES
from lit_ort.runtime.elements import DTYPES
from lit_ort.runtime.engines.engine_interface import DOMAIN, IN_PLACE_OPERATOR, OPERATOR, POSITION
from lit_ort.runtime.engines.node_callbacks import fail, results_of
from lit_ort.runtime.engines.stock.dlpack_views import MOST_DIMENSIONS, Window, Windows
from lit_ort.runtime.engines.stock.library import Library
from lit_ort.runtime.engines.stock.torch_allocator import SessionAllocator

_PROVIDER = b"CPUExecutionProvider"
# The version of the struct below; its fields are unchanged since onnxruntime 1.18.
_VERSION = 18
_UNDEFINED, _VARIADIC = 0, 2

_Aliases = ctypes.CFUNCTYPE(c_size_t, POINTER(c_uint64), POINTER(c_uint64))
_Release = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
_NameOf = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_Indexed = ctypes.CFUNCTYPE(c_int, c_void_p, c_size_t)
_Count = ctypes.CFUNCTYPE(c_size_t, c_void_p)
_Number = ctypes.CFUNCTYPE(c_int, c_void_p)
CreateKernel = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p))
_Compute = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p)


class CustomOperator(ctypes.Structure):
    _fields_ = [
        ("version", c_uint32),
        ("CreateKernel", c_void_p),
        ("GetName", _NameOf),
        ("GetExecutionProviderType", _NameOf),
        ("GetInputType", _Indexed),
        ("GetInputTypeCount", _Count),
        ("GetOutputType", _Indexed),
        ("GetOutputTypeCount", _Count),
        ("KernelCompute", c_void_p),
        ("KernelDestroy", c_void_p),
        ("GetInputCharacteristic", _Indexed),
        ("GetOutputCharacteristic", _Indexed),
        ("GetInputMemoryType", _Indexed),
        ("GetVariadicInputMinArity", _Number),
        ("GetVariadicInputHomogeneity", _Number),
        ("GetVariadicOutputMinArity", _Number),
        ("GetVariadicOutputHomogeneity", _Number),
        ("CreateKernelV2", CreateKernel),
        ("KernelComputeV2", c_void_p),
        ("InferOutputShapeFn", c_void_p),
        ("GetStartVersion", c_void_p),
        ("GetEndVersion", c_void_p),
        ("GetMayInplace", c_void_p),
        ("ReleaseMayInplace", c_void_p),
        ("GetAliasMap", c_void_p),
        ("ReleaseAliasMap", c_void_p),
    ]


def variadic_operator(name: str, create: Any, compute: int, is_in_place: bool = False) -> CustomOperator:
    """An operator of any number of tensors of any types; the struct keeps its functions alive.

    Args:
        name: its name.
        create: its callback `CreateKernelV2`.
        compute: the address of its function `KernelComputeV2`.
        is_in_place: whether the first output has the memory of the first input.
    """
    names = ctypes.create_string_buffer(name.encode()), ctypes.create_string_buffer(_PROVIDER)
    title, provider = map(ctypes.addressof, names)
    operator = CustomOperator(
        version=_VERSION,
        GetName=_NameOf(lambda this: title),
        GetExecutionProviderType=_NameOf(lambda this: provider),
        GetInputType=_Indexed(lambda this, k: _UNDEFINED),
        GetInputTypeCount=_Count(lambda this: 1),
        GetOutputType=_Indexed(lambda this, k: _UNDEFINED),
        GetOutputTypeCount=_Count(lambda this: 1),
        # A session can be destroyed after Python's shutdown, so this is a harmless C function, not a callback.
        KernelDestroy=ctypes.cast(ctypes.pythonapi.Py_IsInitialized, c_void_p).value,
        GetInputCharacteristic=_Indexed(lambda this, k: _VARIADIC),
        GetOutputCharacteristic=_Indexed(lambda this, k: _VARIADIC),
        GetInputMemoryType=_Indexed(lambda this, k: 0),
        GetVariadicInputMinArity=_Number(lambda this: 0),
        GetVariadicInputHomogeneity=_Number(lambda this: 0),
        GetVariadicOutputMinArity=_Number(lambda this: 1),
        GetVariadicOutputHomogeneity=_Number(lambda this: 0),
        CreateKernelV2=create,
        KernelComputeV2=compute,
    )
    operator.names = names
    if is_in_place:
        position = c_int(0)
        address = ctypes.addressof(position)
        functions = _Aliases(functools.partial(_write_aliases, address)), _Release(lambda inputs, outputs: None)
        operator.GetAliasMap, operator.ReleaseAliasMap = (ctypes.cast(one, c_void_p).value for one in functions)
        operator.aliases = position, functions
    return operator


def _write_aliases(address: int, inputs: Any, outputs: Any) -> int:
    """Says that the first input and the first output share memory; returns the number of such pairs."""
    inputs[0] = outputs[0] = address
    return 1


class TorchOperator:
    """The operator, and the kernels that sessions created of it.

    Args:
        library: ONNX Runtime's library.
        allocator: the memory of results; None if sessions allocate it, so that results are copied.
        around: returns the address of a function that calls another one, and what keeps it alive; None for none.

    Attributes:
        domain: the OrtCustomOpDomain that a session's options need.
    """

    def __init__(
        self,
        library: Library,
        allocator: SessionAllocator | None,
        around: Callable[[int], tuple[int, object]] | None = None,
    ) -> None:
        self._library, self._allocator, self._windows = library, allocator, Windows()
        self._kernels: dict[int, _Kernel] = {}
        self._numbers = itertools.count(1)
        # Both are thread-local: kernels are created and run on the thread that creates or runs their session.
        self._session, self._run = _Creation(), _Run()
        self._compute_function = _Compute(self._compute)
        address = ctypes.cast(self._compute_function, c_void_p).value
        assert address is not None
        if around is not None:
            address, self._code = around(address)
        # Sessions call its functions as long as they exist.
        create = CreateKernel(self._create)
        self._structs = (
            variadic_operator(OPERATOR, create, address),
            variadic_operator(IN_PLACE_OPERATOR, create, address, is_in_place=True),
        )
        self.domain = library.new("CreateCustomOpDomain", DOMAIN.encode())
        for struct in self._structs:
            library.call("CustomOpDomain_Add", self.domain, byref(struct))

    @contextmanager
    def creating(self, inputs: Sequence[str], device: torch.device) -> Iterator[list[int]]:
        """A context for the creation of a session on this thread; yields a list that collects its kernels' numbers.

        Args:
            inputs: the names of the model's inputs.
            device: the device of the model.
        """
        self._session.inputs = {name: k for k, name in enumerate(inputs)}
        self._session.on_cpu = is_cpu(device)
        self._session.numbers = []
        yield self._session.numbers

    @contextmanager
    def running(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context for the run of a session on this thread; its kernels read the session's inputs from `tensors`."""
        previous, self._run.tensors = self._run.tensors, tensors
        try:
            yield
        finally:
            self._run.tensors = previous

    def drop(self, numbers: Sequence[int]) -> None:
        """Removes the kernels of a released session."""
        for number in numbers:
            self._kernels.pop(number).close()

    def _create(self, this: int, table: int, info: int, kernel: Any) -> int | None:
        try:
            number = next(self._numbers)
            kernel_inputs = _inputs(self._library, info, self._session.inputs, self._windows)
            creation = self._session
            self._kernels[number] = _Kernel(
                info, self._library, self._allocator, kernel_inputs, self._windows, creation.on_cpu
            )
            self._session.numbers.append(number)
            kernel[0] = number
            return None
        # No error may be raised into C; the status makes the session's creation fail.
        except Exception as error:
            return self._library.failed(f"{type(error).__name__}: {error}")

    def _compute(self, number: int, context: int) -> int | None:
        return self._kernels[number].compute(context, self._run.tensors)


class _Creation(threading.local):
    """The session that is created on this thread: the positions of its inputs by name, and its kernels' numbers."""

    def __init__(self) -> None:
        self.inputs: dict[str, int] = {}
        self.numbers: list[int] = []
        self.on_cpu = True


class _Run(threading.local):
    """The inputs of the run on this thread."""

    tensors: Sequence[torch.Tensor] = ()


@dataclasses.dataclass(frozen=True)
class _Input:
    """An input of a node: an input of the session, by position, or a computed value, read through a window."""

    position: int | None
    element: int
    window: Window | None


class _Kernel:
    """One torch node of one session.

    Its windows are shared by all runs, so the lock allows one thread at a time to use them.
    """

    def __init__(
        self,
        info: int,
        library: Library,
        allocator: SessionAllocator | None,
        inputs: Sequence[_Input],
        windows: Windows,
        on_cpu: bool,
    ) -> None:
        self._on_cpu = on_cpu
        self._library, self._allocator, self._inputs, self._windows = library, allocator, inputs, windows
        self._position = int(attribute_of(library, info, POSITION))
        self._outputs = [
            DTYPES[_element(library, info, "KernelInfo_GetOutputTypeInfo", k)]
            for k in range(_number(library, info, "KernelInfo_GetOutputCount"))
        ]
        self._lock = threading.Lock()
        # C functions write to these.
        self._value, self._rank, self._element, self._data = c_uint64(), c_uint64(), c_int(), c_uint64()
        self._sizes = (c_int64 * MOST_DIMENSIONS)()

    def close(self) -> None:
        for source in self._inputs:
            if source.window is not None:
                self._windows.give_back(source.element, source.window)

    def compute(self, context: int, session_inputs: Sequence[torch.Tensor]) -> int | None:
        """Runs the node once; returns a status if it failed.

        Args:
            context: the OrtKernelContext of the run.
            session_inputs: the inputs of the session's run.
        """
        try:
            with self._lock:
                tensors = [
                    session_inputs[source.position]
                    if source.position is not None
                    else self._value_tensor(context, k, source.window)
                    for k, source in enumerate(self._inputs)
                ]
            given = dict[int, int]()
            outputs = functools.partial(self._output_memory, context, given) if self._allocator is None else None
            found = results_of(self._position, tensors, outputs)
            if found is None:
                return self._library.failed("a torch node failed")
            del tensors
            results = [_apart(result, k, given) for k, result in enumerate(found)]
            with self._lock:
                for k, dtype in enumerate(self._outputs):
                    self._write_output(context, k, results[k], dtype)
            return None
        except BaseException as error:  # noqa: B036 - nothing may be raised into C
            fail(self._position, error)
            return self._library.failed("a torch node failed")

    def _value_tensor(self, context: int, k: int, window: Window | None) -> torch.Tensor:
        """A tensor over the memory of the node's input `k`."""
        assert window is not None
        library, raw = self._library, self._library.raw
        library.check(raw["KernelContext_GetInput"](context, k, byref(self._value)))
        value = self._value.value
        library.check(raw["GetTensorMutableData"](value, window.data))
        if library.shape_of is not None:
            library.check(library.shape_of(value, byref(self._element), window.shape, byref(self._rank)))
        else:
            window.set_shape(self._sizes)
            read_shape(library, value, self._element, self._sizes, self._rank)
        if not self._on_cpu and self._allocator is not None:
            window.set_device(self._allocator.device_at(window.address_of_data()))
        return window.tensor(self._rank.value)

    def _output_memory(
        self, context: int, given: dict[int, int], k: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The memory of the node's output `k`, whose address is added to `given`."""
        with self._lock:
            self._allocate(context, k, shape)
            given[k] = self._data.value
            size = math.prod(shape) * dtype.itemsize
            memory = (ctypes.c_uint8 * size).from_address(self._data.value)
        return torch.frombuffer(memory, dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)

    def _allocate(self, context: int, k: int, shape: Sequence[int]) -> None:
        """Reads the address of the node's output `k`, for which ONNX Runtime then has memory."""
        sizes = (c_int64 * max(len(shape), 1))(*shape)
        library, raw = self._library, self._library.raw
        library.check(raw["KernelContext_GetOutput"](context, k, sizes, len(shape), byref(self._value)))
        library.check(raw["GetTensorMutableData"](self._value.value, byref(self._data)))

    def _write_output(self, context: int, k: int, result: torch.Tensor, dtype: torch.dtype) -> None:
        """Makes a result the node's output `k`; copies it if its memory can't become the output's."""
        if result.dtype != dtype:
            raise EngineError(
                f"output {k} of a torch node is {result.dtype}, but the model declares {dtype}. Please report it, with "
                "the files of dump_dir."
            )
        with nullcontext() if self._allocator is None else self._allocator.offering(result) as offered:
            self._allocate(context, k, result.shape)
        if not result.numel() or self._data.value == (result if offered is None else offered).data_ptr():
            return
        if not is_cpu(result.device):
            raise EngineError(
                f"output {k} of a torch node is on {result.device}, but ONNX Runtime allocated CPU memory for it. "
                "Please report it, with the files of dump_dir."
            )
        if result.nbytes < SMALL_BYTES:
            source = result.contiguous()
            ctypes.memmove(self._data.value, source.data_ptr(), source.nbytes)
        else:
            memory = (ctypes.c_uint8 * result.nbytes).from_address(self._data.value)
            torch.frombuffer(memory, dtype=dtype).view(result.shape).copy_(result)


def _apart(result: torch.Tensor, k: int, given: Mapping[int, int]) -> torch.Tensor:
    """The node's result `k`, copied if it is in the memory of another output, whose result is written over it.

    Args:
        given: the addresses of outputs whose memory the node has used, by their positions.
    """
    others = [address for position, address in given.items() if position != k]
    return result.clone() if others and result.untyped_storage().data_ptr() in others else result


def read_shape(library: Library, value: int, element: c_int, sizes: Any, rank: c_uint64) -> None:
    """Reads a value's element type, sizes and rank into the arguments, with functions of versions before 1.24."""
    info = library.new("GetTensorTypeAndShape", value)
    library.call("GetDimensionsCount", info, byref(rank))
    library.call("GetDimensions", info, sizes, MOST_DIMENSIONS)
    library.call("GetTensorElementType", info, byref(element))
    library.release("ReleaseTensorTypeAndShapeInfo", info)


def _inputs(library: Library, info: int, positions: dict[str, int], windows: Windows) -> list[_Input]:
    """The inputs of a node.

    Args:
        library: ONNX Runtime's library.
        info: the node's OrtKernelInfo.
        positions: the positions of the session's inputs, by name.
        windows: the source of windows for computed values.
    """
    inputs = []
    for k in range(_number(library, info, "KernelInfo_GetInputCount")):
        position = positions.get(_text(library, "KernelInfo_GetInputName", info, k))
        element = _element(library, info, "KernelInfo_GetInputTypeInfo", k)
        inputs.append(_Input(position, element, windows.take(element) if position is None else None))
    return inputs


def attribute_of(library: Library, info: int, name: str) -> str:
    return _text(library, "KernelInfoGetAttribute_string", info, name.encode())


def _text(library: Library, function: str, *arguments: Any) -> str:
    size = c_size_t()
    library.call(function, *arguments, None, byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.call(function, *arguments, text, byref(size))
    return text.value.decode()


def _number(library: Library, info: int, function: str) -> int:
    count = c_size_t()
    library.call(function, info, byref(count))
    return count.value


def _element(library: Library, info: int, function: str, k: int) -> int:
    type_info, tensor_info, element = library.new(function, info, k), c_void_p(), c_int()
    library.call("CastTypeInfoToTensorInfo", type_info, byref(tensor_info))
    library.call("GetTensorElementType", tensor_info, byref(element))
    library.release("ReleaseTypeInfo", type_info)
    return element.value
