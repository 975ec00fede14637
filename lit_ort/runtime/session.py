"""Sessions: a phase of a program with the torch nodes, memory and engine session of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter

import torch

from lit_ort._compat.torch_ops import ASSERTIONS
from lit_ort.errors import KernelError, SessionError
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.clock import Clock
from lit_ort.runtime.engines.engine_interface import Engine, Model
from lit_ort.runtime.engines.no_session import NoSession
from lit_ort.runtime.latest import MOST_SIZES, Latest
from lit_ort.runtime.native_phase import NativePhase
from lit_ort.runtime.nodes import Hooks, NodeFunction, RunState, bind, failed_statement, from_ort, overload_of, to_ort
from lit_ort.runtime.program import Phase, Source, TorchNode
from lit_ort.runtime.random import RandomNumbers
from lit_ort.runtime.region_calls import RegionFunction, region_functions
from lit_ort.runtime.sizes import Shapes, inputs_in, values_of


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """How sessions run.

    Args:
        engine: creates the sessions.
        threads: the intra-op threads of one session.
        allow_spinning: whether idle threads spin instead of sleeping.
        pool: memory for the results of torch nodes; the sessions of one model share it to save memory.
        hooks: functions of this process that implement operators, by target.
        clock: records the time of the runs.
        before_run: called before each run.
    """

    engine: Engine
    threads: int
    allow_spinning: bool = False
    pool: BufferPool = dataclasses.field(default_factory=BufferPool)
    hooks: Hooks = dataclasses.field(default_factory=dict)
    clock: Clock = dataclasses.field(default_factory=Clock)
    before_run: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True)
class RunInputs:
    """The values that a run can read.

    Args:
        tensors: the graph's tensor inputs by position; at least those that the run reads.
        shapes: the shapes of all tensor inputs.
        random: the random numbers of the run.
        saved: the values that the forward saved for the backward.
        tangents: gradients of results, by position.
    """

    tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
    shapes: Shapes
    random: RandomNumbers = dataclasses.field(default_factory=RandomNumbers)
    saved: Sequence[torch.Tensor] = ()
    tangents: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)


class Session:
    """A phase, ready to run.

    Raises:
        SessionError: ONNX Runtime has no kernel for an operator, or rejects the model.
        TypeError: a torch node's target is not a torch operator.
    """

    def __init__(self, phase: Phase, options: SessionOptions) -> None:
        self._phase, self._pool, self._clock = phase, options.pool, options.clock
        self._before_run = options.before_run
        self._sources = [source for _, source in phase.inputs]
        self._sizes: Latest[tuple[Sequence[int], ...], tuple[list[int], list[torch.Tensor]]] = Latest(MOST_SIZES)
        terms = [*phase.terms, *(term for source in self._sources for term in source.terms)]
        self._sized_inputs = inputs_in(terms)
        self._has_sizes = bool(phase.terms) or any(source.kind == "sizes" for source in self._sources)
        self._converted = [(position, form) for position, form in enumerate(phase.forms) if form]
        self._engine = None
        self._native: NativePhase | None = None
        # Of the graph's inputs, if a native session reads nothing else.
        self._positions: list[int] | None = None
        if not phase.outputs and not phase.nodes:
            # The graph computes nothing: its outputs are inputs, numbers or constants.
            return
        if phase.is_native:
            self._native = NativePhase(
                phase, options.engine, options.threads, self._functions(options), self._location_of
            )
            if all(source.kind == "tensor" for source in self._sources):
                self._positions = [source.index for source in self._sources]
            return
        model = Model(
            phase.model,
            self._functions(options),
            self._location_of,
            [name for name, _ in phase.inputs],
            phase.outputs,
            torch.device(phase.device),
        )
        if not phase.model:
            _require_one_node(phase)
            self._engine = NoSession(model)
            return
        self._engine = options.engine.session(model, threads=options.threads, allow_spinning=options.allow_spinning)

    def before_run(self) -> None:
        """Frees what has to be free when a run begins; a run calls it too."""
        if self._before_run is not None:
            self._before_run()

    def run(self, inputs: RunInputs) -> list[torch.Tensor]:
        """Runs the phase once and returns its outputs, in order.

        Raises:
            SessionError: a kernel rejected its inputs.
        """
        if self._engine is None and self._native is None:
            return []
        numbers, tensors = self._inputs(inputs)
        self.before_run()
        state = RunState(self._pool, numbers, inputs.random)
        start = perf_counter()
        try:
            if self._native is not None:
                return self._native.run(tensors, inputs.shapes, state)
            assert self._engine is not None
            results = self._engine.run(tensors, state)
        finally:
            self._clock.sessions += perf_counter() - start
        for position, form in self._converted:
            results[position] = from_ort(results[position], form)
        return results

    def _functions(self, options: SessionOptions) -> list[NodeFunction]:
        """The functions of the torch nodes."""
        phase = self._phase
        device, regions = torch.device(phase.device), _functions_of_regions(phase)
        return [options.clock.node(bind(node, options.hooks, device, regions)) for node in phase.nodes]

    def _inputs(self, inputs: RunInputs) -> tuple[Sequence[int], list[torch.Tensor]]:
        """The numbers that torch nodes read, and the inputs of the session."""
        numbers, vectors = self._sizes_for(inputs.shapes) if self._has_sizes else ((), ())
        if self._positions is not None:
            return numbers, [inputs.tensors[k] for k in self._positions]
        size_vectors = iter(vectors)
        return numbers, [_input(source, inputs, size_vectors) for source in self._sources]

    def _location_of(self, index: int, error: BaseException) -> str | None:
        """The location of an error in a torch node, for messages: `aten.embedding in layers.0.embedding`.

        None for a failed assertion of the program, which is eager's error.
        """
        node = self._phase.nodes[index]
        statement = failed_statement(node, error)
        if statement is None:
            return _operators(node)
        if overload_of(statement.target) in ASSERTIONS:
            return None
        operator = statement.target.removesuffix(".default")
        return f"{operator} in {statement.module}" if statement.module else operator

    def _sizes_for(self, shapes: Shapes) -> tuple[list[int], list[torch.Tensor]]:
        key = tuple([shapes[k] for k in self._sized_inputs])
        entry = self._sizes.get(key)
        if entry is None:
            vectors = [torch.tensor(values_of(s.terms, shapes)) for s in self._sources if s.kind == "sizes"]
            entry = self._sizes[key] = (values_of(self._phase.terms, shapes), vectors)
        return entry


def _require_one_node(phase: Phase) -> None:
    """Checks that a phase without a model is one torch node with the phase's inputs and outputs.

    Raises:
        SessionError: it is not, as in a damaged entry of a cache.
    """
    sizes = [(len(node.inputs), len(node.outputs)) for node in phase.nodes]
    if sizes != [(len(phase.inputs), len(phase.outputs))]:
        raise SessionError(f"a phase of {len(phase.nodes)} torch nodes has no model", remedy="Compile the graph again.")


def _functions_of_regions(phase: Phase) -> Mapping[str, RegionFunction]:
    try:
        return region_functions(phase.nodes)
    except (KernelError, ValueError) as error:
        raise SessionError(f"a region has no code: {error}", remedy="Compile the graph again.") from error


def _input(source: Source, inputs: RunInputs, size_vectors: Iterator[torch.Tensor]) -> torch.Tensor:
    if source.kind == "tensor":
        return to_ort(inputs.tensors[source.index], source.form)
    if source.kind == "saved":
        return to_ort(inputs.saved[source.index], source.form)
    if source.kind == "tangent":
        return to_ort(inputs.tangents[source.index], source.form)
    if source.kind == "seed":
        return torch.tensor(inputs.random.seed)
    return next(size_vectors)


def _operators(node: TorchNode) -> str:
    """The first operators of a torch node."""
    names = [statement.target.removesuffix(".default") for statement in node.statements]
    text = ", ".join(dict.fromkeys(names[:8]))
    return f"{text}{' ...' if len(names) > 8 else ''}"
