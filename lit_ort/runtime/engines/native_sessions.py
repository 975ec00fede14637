"""Sessions of matmuls and compiled regions, which call no Python but for torch nodes.

On the threads of OpenMP that torch's operators use, matmuls are custom operators; on ONNX Runtime's own threads, they
are its kernels. Regions and the loops of recurrent layers are custom operators.

They are created and run through the C interface, in both builds in the same way.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from ctypes import byref, c_char_p, c_int64, c_uint64, c_void_p
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from lit_ort._compat import openmp as torch_openmp
from lit_ort._compat.held_signals import HeldSignals
from lit_ort.errors import EngineError, SessionError
from lit_ort.kernels.convolution_calls import convolution_call_words
from lit_ort.kernels.grouped_matmul_calls import GroupedMatmul, GroupedMatmulCallWords, GroupedMatmulCode
from lit_ort.kernels.kernel_arguments import WORD
from lit_ort.kernels.kernel_calls import Kernel
from lit_ort.kernels.loss_calls import LossCall, LossCallWords, LossCode
from lit_ort.kernels.machine_code import MachineCode
from lit_ort.kernels.matmul_calls import Matmul, MatmulCallWords, MatmulCode
from lit_ort.kernels.operator_entry import (
    TYPE_WORDS,
    CallWords,
    ContextFunctions,
    OperatorEntry,
    RegionCallWords,
    with_denormals,
    without_denormals,
)
from lit_ort.kernels.recurrent_calls import RecurrentCall, RecurrentCallCode, RecurrentCallWords
from lit_ort.ops.image_convolution import convolutions
from lit_ort.ops.recurrent import recurrent_loops
from lit_ort.regions.placed_region import SizedRegion
from lit_ort.runtime.buffers import SMALL_BYTES, tensor_in
from lit_ort.runtime.elements import ELEMENTS
from lit_ort.runtime.engines.engine_interface import (
    CHECK_THE_BATCH,
    FOR_A_REPORT,
    KERNEL_DOMAIN,
    KERNEL_OPERATORS,
    POSITION,
    SMALLEST_MODEL,
    Model,
)
from lit_ort.runtime.engines.node_callbacks import Serving
from lit_ort.runtime.engines.stock.library import Library
from lit_ort.runtime.engines.stock.torch_node_operator import (
    CreateKernel,
    TorchOperator,
    attribute_of,
    variadic_operator,
)
from lit_ort.runtime.latest import MOST_SIZES, Latest
from lit_ort.runtime.nodes import RunState
from lit_ort.runtime.program import ConvolutionNode, GroupedMatmulNode, LoopNode, LossNode, MatmulNode
from lit_ort.runtime.region_calls import kernels

# Errors are raised, not logged.
_FATAL_ONLY = 4
# What a kernel reports follows this in the message of a run's status.
_MESSAGE = "Status Message: "
_NO_OPTIMIZATION = 0
# Results of so many runs may keep the memory of their runs: those of a step, and gradients that are accumulated.
_MOST_KEPT = 3
# Threads of OpenMP spin for milliseconds after torch's last operator, such as an optimizer's, on the cores that a run
# needs. Ending them takes 50 us, and starting them again as much, so it is worth it before runs of so many seconds.
_LONG_RUN = 3e-3
# omp_pause_soft of omp.h.
_SOFT = 1
_P, _S = c_void_p, ctypes.c_size_t
_Run = ctypes.CFUNCTYPE(_P, _P, _P, _P, _P, _S, _P, _S, _P)
_Bind = ctypes.PYFUNCTYPE(_P, _P, _S, _P, _P, _P, _P)
_Failed = ctypes.CFUNCTYPE(c_void_p, c_void_p)
# The words of calls that can say why they failed.
FallibleWords = RegionCallWords | LossCallWords


class NativeRegion(NamedTuple):
    """A region of a model.

    Args:
        placed: the region with its arguments; some of them are sizes of the call.
        kernel: its machine code.
        module: the name of the module that it comes from; empty if unknown.
    """

    placed: SizedRegion
    kernel: Kernel
    module: str


@dataclasses.dataclass(frozen=True)
class NativeModel(Model):
    """A model whose matmuls and regions call no Python; it can have torch nodes, which do.

    Args:
        regions: its regions; a node's attribute is its position among these.
        matmuls: its matmuls that are custom operators, likewise; the sizes of each are given at a run.
        loops: its loops of recurrent layers, in the same way.
        losses: its output layers with cross entropy, in the same way.
        groups: its matmuls of groups of rows, in the same way.
        convolutions: its convolutions of images, in the same way.
        results: the number of outputs that a run returns; the others are values whose memory a run provides.
        has_sizes: whether sizes change from run to run.
        uses_openmp: whether OpenMP's threads compute regions and matmuls.
    """

    regions: Sequence[NativeRegion] = ()
    matmuls: Sequence[MatmulNode] = ()
    loops: Sequence[LoopNode] = ()
    losses: Sequence[LossNode] = ()
    groups: Sequence[GroupedMatmulNode] = ()
    convolutions: Sequence[ConvolutionNode] = ()
    results: int = 0
    has_sizes: bool = False
    uses_openmp: bool = False

    @property
    def kernels(self) -> Mapping[str, int]:
        """The number of its kernels of each operator."""
        nodes = self.regions, self.matmuls, self.loops, self.losses, self.groups, self.convolutions
        return dict(zip(KERNEL_OPERATORS, map(len, nodes), strict=True))


class RunShapes(NamedTuple):
    """What depends on the sizes of a run.

    Args:
        kernels: the sizes that each kernel takes, in the order of their operators.
        outputs: the shape of each output, and the shape in which the session computes it.
        places: the offset of an output in the memory of the run, by the output's position.
        size: of this memory, in bytes.
    """

    kernels: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], ...]
    places: Mapping[int, int]
    size: int


class NativeEngine:
    """Creates native sessions.

    Args:
        library: ONNX Runtime's functions.
        environment: the OrtEnv.
        shares_arena: whether the process's environment has an arena, which these sessions then use.
    """

    def __init__(self, library: Library, environment: int, shares_arena: bool) -> None:
        self._library, self._environment, self._shares_arena = library, environment, shares_arena
        # Kernels are created on the thread that creates their session.
        self._creation = _Creation()
        self._create = {name: CreateKernel(functools.partial(self._create_kernel, name)) for name in KERNEL_OPERATORS}
        self._failed = _Failed(self._status_of_failure)
        # By their addresses: the words of calls.
        self._calls: WeakValueDictionary[int, FallibleWords] = WeakValueDictionary()
        self._entry = self._entry_of_kernels()
        self._kernels = [
            variadic_operator(name, function, self._entry.address) for name, function in self._create.items()
        ]
        self._domain = library.new("CreateCustomOpDomain", KERNEL_DOMAIN.encode())
        for kernel in self._kernels:
            library.call("CustomOpDomain_Add", self._domain, byref(kernel))
        bind = functools.partial(_Bind(self._entry.bind), library.new("CreateCpuMemoryInfo", 0, 0))
        self._process = _Process(library, bind, self._calls)
        self._pools: dict[bool, _Pool] = {}
        self._start_process()

    @property
    def uses_openmp(self) -> bool:
        """Whether sessions run on OpenMP's threads."""
        return torch_openmp.uses_openmp()

    def session(self, model: NativeModel, threads: int) -> NativeSession:
        """Creates a session.

        Args:
            model: the model.
            threads: the number of intra-op threads.

        Raises:
            SessionError: ONNX Runtime rejects the model.
            ValueError: the arguments of a region aren't valid.
        """
        library, pool = self._library, self._pool(model.uses_openmp)
        slots = (c_int64 * (1 + sum(model.kernels.values())))()
        options = library.new("CreateSessionOptions")
        torch_nodes: list[int] = []
        try:
            self._set(options, model, pool, threads)
            ends = itertools.accumulate(model.kernels.values(), initial=0)
            first = ctypes.addressof(slots)
            self._creation.slots = {name: first + WORD * end for name, end in zip(model.kernels, ends, strict=False)}
            with pool.operator.creating(model.inputs, model.device) as torch_nodes:
                session = library.new("CreateSessionFromArray", self._environment, model.data, len(model.data), options)
        except EngineError as error:
            pool.operator.drop(torch_nodes)
            raise SessionError(f"ONNX Runtime rejects the model: {str(error).strip()}", remedy=FOR_A_REPORT) from error
        finally:
            library.release("ReleaseSessionOptions", options)
        resources = _Resources(self._process, pool, session, slots, torch_nodes)
        return NativeSession(self._process, pool, resources, model)

    def _pool(self, uses_openmp: bool) -> _Pool:
        """How sessions run on OpenMP's threads, or on their own."""
        if uses_openmp not in self._pools:
            cpu, openmp = kernels().cpu, torch_openmp.find_openmp() if uses_openmp else None
            matmuls = MatmulCode(kernels().matmuls, cpu, kernels().runner) if uses_openmp else None
            run, code = without_denormals(cpu, openmp, self._library.address("Run"))
            self._pools[uses_openmp] = _Pool(
                _Run(run),
                code,
                TorchOperator(self._library, None, functools.partial(with_denormals, cpu, openmp)),
                None if uses_openmp else torch_openmp.pause_of_openmp(),
                matmuls,
                LossCode(kernels()) if uses_openmp else None,
                GroupedMatmulCode(kernels()) if uses_openmp else None,
            )
        return self._pools[uses_openmp]

    def _set(self, options: int, model: NativeModel, pool: _Pool, threads: int) -> None:
        library = self._library
        library.call("SetIntraOpNumThreads", options, 1 if model.uses_openmp else threads)
        library.call("SetSessionGraphOptimizationLevel", options, _NO_OPTIMIZATION)
        library.call("SetSessionLogSeverityLevel", options, _FATAL_ONLY)
        if model.has_sizes:
            # A pattern of memory would be kept for each set of sizes.
            library.call("DisableMemPattern", options)
        # Threads spin during a run and not after it, when torch's threads compute; not at all beside torch nodes, whose
        # threads they would keep from the cores.
        entries = {"session.intra_op.allow_spinning": str(int(not model.nodes)), "session.force_spinning_stop": "1"}
        entries |= {"session.use_env_allocators": str(int(self._shares_arena)), "session.set_denormal_as_zero": "1"}
        for key, value in entries.items():
            library.call("AddSessionConfigEntry", options, key.encode(), value.encode())
        if model.nodes:
            library.call("AddCustomOpDomain", options, pool.operator.domain)
        if any(model.kernels.values()):
            library.call("AddCustomOpDomain", options, self._domain)

    def _entry_of_kernels(self) -> OperatorEntry:
        address, failed = self._library.address, ctypes.cast(self._failed, c_void_p).value
        assert failed is not None
        functions = ContextFunctions(
            get_input=address("KernelContext_GetInput"),
            get_output=address("KernelContext_GetOutput"),
            get_data=address("GetTensorMutableData"),
            create_value=address("CreateTensorWithDataAsOrtValue"),
            release_value=address("ReleaseValue"),
            parallel_for=address("KernelContext_ParallelFor"),
            failed=failed,
        )
        return OperatorEntry(kernels().cpu, functions)

    def _start_process(self) -> None:
        """Creates the first session: ONNX Runtime applies its setting of denormals to the calling thread, for good."""
        options = self._library.new("CreateSessionOptions")
        arguments = (self._environment, SMALLEST_MODEL, len(SMALLEST_MODEL), options)
        self._library.release("ReleaseSession", self._library.new("CreateSessionFromArray", *arguments))
        self._library.release("ReleaseSessionOptions", options)

    def _status_of_failure(self, words: int) -> int | None:
        """The status of a call that has failed; called while the session runs."""
        try:
            return self._library.failed(self._calls[words].failure())
        # No error may be raised into C.
        except Exception as error:
            return self._library.failed(f"a kernel failed ({type(error).__name__}: {error})")

    def _create_kernel(self, operator: str, this: int, table: int, info: int, kernel: Any) -> int | None:
        try:
            position = int(attribute_of(self._library, info, POSITION))
            kernel[0] = self._creation.slots[operator] + WORD * position
            return None
        # No error may be raised into C; the status makes the session's creation fail.
        except Exception as error:
            return self._library.failed(f"{type(error).__name__}: {error}")


class _Creation(threading.local):
    """The address of the first word of each operator's kernels, of the session that is created on this thread."""

    slots: Mapping[str, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class _Process:
    """What all native sessions of the process use.

    Args:
        library: ONNX Runtime's functions.
        bind: `OperatorEntry.bind` for memory of the CPU.
        calls: the words of calls that can fail, by their addresses.
    """

    library: Library
    bind: Callable[..., int | None]
    calls: MutableMapping[int, FallibleWords]


@dataclasses.dataclass(frozen=True)
class _Pool:
    """How sessions run that have the same threads.

    Args:
        run: a function like OrtApi's `Run`.
        code: of this function.
        operator: the operator of torch nodes.
        pause: ends the idle threads of OpenMP, if they are not the session's; None if nothing does.
        matmuls: the code of matmuls; None for sessions on threads of their own.
        losses: the code of output layers with cross entropy; likewise.
        groups: the code of matmuls of groups of rows; likewise.
    """

    run: Callable[..., int | None]
    code: MachineCode
    operator: TorchOperator
    pause: Callable[[int], int] | None
    matmuls: MatmulCode | None
    losses: LossCode | None
    groups: GroupedMatmulCode | None


@dataclasses.dataclass
class _Resources:
    """A session in C and what it uses; a call releases it.

    Args:
        process: what sessions have in common.
        pool: how it runs.
        session: the OrtSession.
        slots: a word for each kernel, in the order of their operators: the address of the words of its call.
        torch_nodes: the numbers of the kernels of its torch nodes.
        values: its inputs and outputs.
    """

    process: _Process
    pool: _Pool
    session: int
    slots: Any
    torch_nodes: Sequence[int]
    values: tuple[_Values, ...] = ()

    def __call__(self) -> None:
        self.process.library.release("ReleaseSession", self.session)
        self.pool.operator.drop(self.torch_nodes)
        for values in self.values:
            values.release()


class NativeSession:
    """A session and the values of its last run, which the next one uses again where addresses are the same.

    Args:
        process: what sessions have in common.
        pool: how it runs.
        resources: the session in C.
        model: the model.
    """

    def __init__(self, process: _Process, pool: _Pool, resources: _Resources, model: NativeModel) -> None:
        weakref.finalize(self, resources)
        self._process, self._slots, self._model = process, resources.slots, model
        self._lock = threading.Lock()
        self._shapes: RunShapes | None = None
        self._calls = _calls_of(model, process, pool)
        self._bound: list[CallWords] = []
        self._inputs, self._outputs = (_Values(process, len(n)) for n in (model.inputs, model.outputs))
        # Makes a result in the memory of a run or, if it has few bytes, in its own; None for a result that the session
        # allocates when it is computed.
        self._makers: list[Callable[[Any], torch.Tensor] | None] = []
        # Of the outputs that a run does not return.
        self._offsets: list[int] = []
        # The memory of runs whose results are in use.
        self._in_use: list[weakref.ref[np.ndarray]] = []
        self._names = [(c_char_p * len(n))(*(x.encode() for x in n)) for n in (model.inputs, model.outputs)]
        of_inputs, of_outputs = (
            (ctypes.addressof(names), ctypes.addressof(values.array), len(names))
            for names, values in zip(self._names, (self._inputs, self._outputs), strict=True)
        )
        names, values, count = of_outputs
        self._run = functools.partial(pool.run, resources.session, None, *of_inputs, names, count, values)
        self._pool, self._pause, self._seconds = pool, pool.pause, 0.0
        resources.values = self._inputs, self._outputs

    def run(self, tensors: Sequence[torch.Tensor], shapes: RunShapes, state: RunState) -> list[torch.Tensor]:
        """Runs the model once and returns all outputs, in order.

        Args:
            tensors: the inputs.
            shapes: what depends on the sizes of this run.
            state: of the run.

        Raises:
            SessionError: a kernel rejected its inputs, such as an index out of range.
        """
        # The imaginary part of a conjugate view has a lazy negative bit.
        given = [
            tensor if tensor.is_contiguous() and not tensor.is_neg() else tensor.resolve_neg().contiguous()
            for tensor in tensors
        ]
        with self._lock:
            if shapes is not self._shapes:
                self._bind(shapes, given)
            self._inputs.set(given)
            memory = state.pool.empty(shapes.size, dtype=torch.uint8).numpy() if shapes.size else None
            results = [make(memory) if make is not None else None for make in self._makers]
            self._outputs.set(results, self._addresses(memory))
            if self._model.nodes:
                with HeldSignals(), Serving(self._model, state), self._pool.operator.running(given):
                    self._call()
            else:
                self._call()
            returned = [
                self._outputs.take(k, *shapes.outputs[k][:2]) if result is None else result
                for k, result in enumerate(results)
            ]
        return returned if memory is None else self._with_own_memory(returned, memory, shapes)

    def _addresses(self, memory: np.ndarray | None) -> list[int]:
        """The addresses of the outputs that a run does not return."""
        if memory is None:
            return []
        start = memory.ctypes.data
        return [start + offset for offset in self._offsets]

    def _with_own_memory(
        self, results: list[torch.Tensor], memory: np.ndarray, shapes: RunShapes
    ) -> list[torch.Tensor]:
        """The results, copied from the memory of their run if results of several earlier runs are still in use.

        A result keeps the memory of its run, which is as much as all values of a run need.
        """
        self._in_use = [one for one in self._in_use if one() is not None]
        if len(self._in_use) >= _MOST_KEPT:
            return [result.clone() if k in shapes.places else result for k, result in enumerate(results)]
        if any(k in shapes.places for k in range(len(results))):
            self._in_use.append(weakref.ref(memory))
        return results

    def _call(self) -> None:
        if self._pause is not None and self._seconds > _LONG_RUN:
            self._pause(_SOFT)
        start = perf_counter()
        status = self._run()
        self._seconds = perf_counter() - start
        if status:
            self._fail(status)

    def _fail(self, status: int) -> None:
        try:
            self._process.library.check(status)
        except EngineError as error:
            message = str(error).rpartition(_MESSAGE)[2].strip()
            raise SessionError(f"a run failed: {message}", remedy=CHECK_THE_BATCH) from error

    def _bind(self, shapes: RunShapes, inputs: Sequence[torch.Tensor]) -> None:
        # An error or an interrupt on the way leaves a session that binds anew.
        self._shapes = None
        words = [call.words(sizes) for call, sizes in zip(self._calls, shapes.kernels, strict=True)]
        self._slots[: len(words)] = [one.address for one in words]
        returned = shapes.outputs[: self._model.results]
        self._makers = [_maker(dtype, shape, shapes.places.get(k)) for k, (dtype, shape, _) in enumerate(returned)]
        self._offsets = [shapes.places[k] for k in range(len(returned), len(shapes.outputs))]
        self._bound, self._shapes = words, shapes
        self._inputs.begin([(tensor.dtype, tensor.shape) for tensor in inputs])
        self._outputs.begin([(dtype, computed) for dtype, _, computed in shapes.outputs])


class _Call:
    """The calls of a kernel, with the latest sizes.

    Args:
        make: the words of the calls with certain sizes.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], CallWords]) -> None:
        self._make = make
        self._latest: Latest[tuple[int, ...], CallWords] = Latest(MOST_SIZES)

    def words(self, sizes: tuple[int, ...]) -> CallWords:
        words = self._latest.get(sizes)
        if words is None:
            words = self._latest[sizes] = self._make(sizes)
        return words


def _calls_of(model: NativeModel, process: _Process, pool: _Pool) -> list[_Call]:
    """The calls of a session's kernels, in the order of their operators."""
    regions = [_words_of_region(region, process, model.uses_openmp) for region in model.regions]
    matmuls = [functools.partial(_words_of, pool.matmuls, node) for node in model.matmuls]
    loops = [functools.partial(_words_of_loop, model.uses_openmp, node) for node in model.loops]
    losses = [functools.partial(_words_of_loss, pool.losses, process, node) for node in model.losses]
    groups = [functools.partial(_words_of_groups, pool.groups, node) for node in model.groups]
    convolutions = [functools.partial(_words_of_convolution, node) for node in model.convolutions]
    return [_Call(make) for make in (*regions, *matmuls, *loops, *losses, *groups, *convolutions)]


def _words_of_region(
    region: NativeRegion, process: _Process, uses_openmp: bool
) -> Callable[[tuple[int, ...]], CallWords]:
    """Makes the words of a region's calls."""
    kernel = region.kernel.sized(region.placed.run)

    def make(sizes: tuple[int, ...]) -> CallWords:
        words = RegionCallWords(kernel.bind(sizes), region.placed, sizes, region.module, uses_openmp)
        process.calls[words.address] = words
        return words

    return make


def _words_of(code: MatmulCode | None, node: MatmulNode, sizes: tuple[int, ...]) -> CallWords:
    """The words of a matmul's calls."""
    assert code is not None
    count, rows, columns, inner = sizes
    matmul = Matmul(node.dtype, count, rows, columns, inner, node.transposed, node.added)
    shape = (count, rows, columns) if node.is_batch else (rows, columns)
    return MatmulCallWords(code, matmul, shape)


@functools.cache
def _recurrent_code() -> RecurrentCallCode:
    return RecurrentCallCode(kernels().cpu)


def _words_of_loop(uses_openmp: bool, node: LoopNode, sizes: tuple[int, ...]) -> CallWords:
    """The words of a loop's calls."""
    loops, (steps, rows, hidden, rows_of_all) = recurrent_loops(), sizes
    assert loops is not None, "there are kernels, so there are loops"
    call = RecurrentCall(node.mode, node.reverse, node.dtype, (steps, rows, hidden), node.inputs, rows_of_all)
    return RecurrentCallWords(_recurrent_code(), loops, call, uses_openmp)


def _words_of_loss(code: LossCode | None, process: _Process, node: LossNode, sizes: tuple[int, ...]) -> CallWords:
    """The words of a loss's calls."""
    assert code is not None
    rows, width, classes = sizes
    call = LossCall(node.dtype, rows, width, classes, node.inputs, node.gradients, node.ignore_index, node.mean)
    words = LossCallWords(code, call, node.module)
    process.calls[words.address] = words
    return words


def _words_of_groups(code: GroupedMatmulCode | None, node: GroupedMatmulNode, sizes: tuple[int, ...]) -> CallWords:
    """The words of the calls of a matmul of groups of rows."""
    assert code is not None
    groups, rows, left, right = sizes
    dtypes, kind = (node.dtype, node.ends_dtype), (node.is_gradient, node.transposed)
    return GroupedMatmulCallWords(code, GroupedMatmul(*dtypes, groups, rows, (left, right), *kind))


def _words_of_convolution(node: ConvolutionNode, sizes: tuple[int, ...]) -> CallWords:
    """The words of a convolution's calls."""
    code = convolutions()
    assert code is not None, "there are kernels, so there are convolutions"
    return convolution_call_words(code, node.kind, node.dtype, sizes, node.windows, node.groups)


class _Values:
    """OrtValues over the memory of tensors; one is made again if its tensor's address has changed."""

    def __init__(self, process: _Process, count: int) -> None:
        self._library = process.library
        self._release = process.library.releases["ReleaseValue"]
        words = max(1, count)
        self.array, self._addresses, self._bound = ((c_uint64 * words)() for _ in range(3))
        self._types = (c_int64 * (TYPE_WORDS * words))()
        self._sizes: list[Any] = []
        # Of each value, the type of its memory, made when a run has made the value.
        self._memory: list[Any] = []
        self._shapes: list[Any] = []
        self._address = c_uint64()
        blocks = map(ctypes.addressof, (self.array, self._addresses, self._bound, self._types))
        self._bind = functools.partial(process.bind, count, *blocks)

    def set(self, tensors: Sequence[torch.Tensor | None], addresses: Sequence[int] = ()) -> None:
        """Makes values of the tensors.

        Args:
            tensors: contiguous; None for a value that a run is to make.
            addresses: of the values after these.
        """
        given = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._addresses[: len(given) + len(addresses)] = [*given, *addresses]
        if status := self._bind():
            self._library.check(status)

    def begin(self, types: Sequence[tuple[torch.dtype, Sequence[int]]]) -> None:
        """Sets the dtypes and shapes of the values of the next runs."""
        if not self._shapes:
            self._shapes, self._sizes, self._memory = ([None] * len(types) for _ in range(3))
        for k, (old, new) in enumerate(zip(self._shapes, types, strict=True)):
            if old != new:
                self._shapes[k] = None
                self._begin(k, *new)
                self._shapes[k] = new

    def _begin(self, k: int, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._drop(k)
        self._memory[k], sizes = None, (c_int64 * len(shape))(*shape)
        self._sizes[k] = sizes
        words = [math.prod(shape) * dtype.itemsize, ctypes.addressof(sizes), len(shape), ELEMENTS[dtype]]
        self._types[TYPE_WORDS * k : TYPE_WORDS * (k + 1)] = words

    def take(self, k: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of a value that a run has made; its memory returns to the session with the tensor."""
        value, address = self.array[k], self._address
        self.array[k] = 0
        self._library.call("GetTensorMutableData", value, byref(address))
        if self._memory[k] is None:
            self._memory[k] = ctypes.c_uint8 * self._types[TYPE_WORDS * k]
        memory = self._memory[k].from_address(address.value)
        weakref.finalize(memory, self._release, value)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def release(self) -> None:
        for k in range(len(self.array)):
            self._drop(k)

    def _drop(self, k: int) -> None:
        if value := self.array[k]:
            self._release(value)
        self.array[k] = self._bound[k] = 0


def _maker(dtype: torch.dtype, shape: tuple[int, ...], offset: int | None) -> Callable[[Any], torch.Tensor] | None:
    """Makes a result; None for a large one, for which memory may be free only when it is computed.

    Args:
        dtype, shape: of the result.
        offset: in the memory of the run; None if it is not there.
    """
    if offset is not None:
        return lambda memory: tensor_in(memory, offset, shape, dtype)
    if math.prod(shape) * dtype.itemsize >= SMALL_BYTES:
        return None
    strides = torch.empty(shape, device="meta").stride()
    # Faster than torch.empty.
    return lambda memory: torch.empty_strided(shape, strides, dtype=dtype)
