"""A compiled model, bound to names, that runs on torch tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import onnxruntime
import torch

from lit_ort.errors import SessionError
from lit_ort.runtime.aten import CHECK_THE_BATCH, Kernel, kernels_available, register_executor
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.engine import ERROR_SEVERITY, ORT_ERRORS, C
from lit_ort.runtime.random import RANDOM_OPERATORS, seed_from_torch
from lit_ort.runtime.tensors import CPU, to_ort, to_torch

# The arena's first chunk is address space, whose memory is taken when it is first written to; parts of it that are free
# become one again, and anything larger than the other figure that a value leaves over of a part is free.
_ARENA = {"arena_extend_strategy": 0, "initial_chunk_size_bytes": 2**30, "max_dead_bytes_per_chunk": 2**16}
# These join two nodes with all attributes of both, of which the split's own mark of the backward is no attribute of the
# result's; only values that are computed again put a forward operator there.
_NOT_FOR_THE_BACKWARD = ("GemmActivationFusion", "ConvActivationFusion")


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """How sessions run.

    Args:
        threads: threads of one session's operators.
        allow_spinning: idle threads spin instead of sleeping.
        kernels: torch kernels that ATen nodes may call, by name.
        pool: memory for what they return, best shared by the sessions of one model.
    """

    threads: int
    allow_spinning: bool = False
    kernels: Mapping[str, Kernel] = dataclasses.field(default_factory=dict)
    pool: BufferPool = dataclasses.field(default_factory=BufferPool)


class Session:
    """One model, ready to run: `run` for fused and forward graphs, `forward` and `backward` for split ones.

    Args:
        model: at ONNX Runtime's opset and IR version.
        inputs: names of the inputs, in the order tensors are given.
        outputs: names of the outputs, in the order tensors are wanted.
        options: threads and spinning.

    Raises:
        SessionError: ONNX Runtime has no kernel for an operator, or refuses the model.
    """

    def __init__(self, model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], options: SessionOptions) -> None:
        self._inputs = list(inputs)
        self.output_names = list(outputs)
        self._options = options
        self._draws = any(node.op_type in RANDOM_OPERATORS for node in model.graph)
        self._session = _create(ir.to_proto(model).SerializeToString(), options)
        self._run: Any = getattr(self._session._sess, "run_with_ortvaluevector")  # noqa: B009 - untyped
        self._devices = [CPU] * len(self.output_names)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One run: all outputs, in order.

        Raises:
            SessionError: a kernel refused its inputs, such as a label out of range.
        """
        if self._draws:
            seed_from_torch()
        fetched = C.OrtValueVector()
        with _running(self._options):
            self._run(C.RunOptions(), self._inputs, to_ort(tensors), self.output_names, fetched, self._devices)
        return to_torch(fetched)


class SplitSession:
    """A model with a YieldOp: forward now, backward later, several in flight, in any order, on any thread.

    Args:
        model: as `gradient.split_gradient` makes it.
        inputs: names of the inputs, in the order tensors are given.
        results: how many outputs the forward hands out.
        options: threads and spinning.
    """

    def __init__(self, model: ir.Model, inputs: Sequence[str], results: int, options: SessionOptions) -> None:
        self._options = options
        self._draws = any(node.op_type in RANDOM_OPERATORS for node in model.graph)
        # The agent keeps pointers into the session, which therefore must outlive it.
        self._session = _create(ir.to_proto(model).SerializeToString(), options, _NOT_FOR_THE_BACKWARD)
        feeds = [value.name for value in self._session.get_inputs()]
        fetches = [value.name for value in self._session.get_outputs()]
        self._order = [list(inputs).index(name) for name in feeds]
        self._agent = C.TrainingAgent(self._session._sess, feeds, [CPU] * results, fetches, [CPU] * len(fetches), 0)

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """The results, and the state that `backward` needs; dropping the state frees what the forward kept."""
        if self._draws:
            seed_from_torch()
        state, fetched = C.PartialGraphExecutionState(), C.OrtValueVector()
        with _running(self._options):
            self._agent.run_forward(to_ort(tensors[k] for k in self._order), fetched, state, None)
        return to_torch(fetched), state

    def backward(self, gradients: Sequence[torch.Tensor], state: Any) -> list[torch.Tensor]:
        """The gradients of the inputs, for the gradients of the yielded outputs; once for each state."""
        fetched = C.OrtValueVector()
        with _running(self._options):
            self._agent.run_backward(to_ort(gradients), fetched, state)
        return to_torch(fetched)


@functools.cache
def register_shared_arena() -> None:
    """One arena for the sessions of this process, so that several shapes don't each keep memory of their own."""
    memory = C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, C.OrtMemType.DEFAULT)
    C.create_and_register_allocator(memory, C.OrtArenaCfg(_ARENA))


@contextmanager
def _running(options: SessionOptions) -> Iterator[None]:
    """One run: torch kernels at hand, errors of ONNX Runtime and of kernels as SessionError."""
    with kernels_available(options.kernels, options.pool):
        try:
            yield
        except ORT_ERRORS as error:
            raise SessionError(f"a run failed: {str(error).strip()}", remedy=CHECK_THE_BATCH) from error


def _create(
    data: bytes, options: SessionOptions, disabled_optimizers: Sequence[str] = ()
) -> onnxruntime.InferenceSession:
    register_executor()
    register_shared_arena()
    settings = onnxruntime.SessionOptions()
    settings.add_session_config_entry("session.use_env_allocators", "1")
    settings.log_severity_level = ERROR_SEVERITY
    settings.intra_op_num_threads = options.threads
    settings.enable_mem_pattern = False
    # As the model lists its nodes: of those that can run, the first one.
    settings.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # A value that is planned into the memory of a dead one keeps that memory even where a torch kernel brings its own;
    # and forwards in flight must not write into each other's.
    settings.enable_mem_reuse = False
    settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(options.allow_spinning)))
    try:
        return onnxruntime.InferenceSession(
            data, settings, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled_optimizers)
        )
    except ORT_ERRORS as error:
        raise SessionError(
            f"ONNX Runtime refuses the model: {str(error).strip()}",
            remedy="fallback='warn' runs this graph in eager; dump_dir keeps the model for a report.",
        ) from error
