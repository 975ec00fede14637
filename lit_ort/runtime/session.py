"""One phase of a program, bound to this process: torch nodes, memory and an engine's session."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.clock import Clock
from lit_ort.runtime.engines.engine import Engine, Model
from lit_ort.runtime.nodes import Hooks, RunState, bind, failed_statement, from_border, to_border
from lit_ort.runtime.program import Phase, Source, TorchNode
from lit_ort.runtime.sizes import Shapes, values_of


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """How sessions run.

    Args:
        engine: what makes them.
        threads: threads of one session's operators.
        allow_spinning: idle threads spin instead of sleeping.
        pool: memory for what torch nodes return, best shared by the sessions of one model.
        hooks: functions of this process that stand for operators, by target.
        clock: receives the time of its runs.
    """

    engine: Engine
    threads: int
    allow_spinning: bool = False
    pool: BufferPool = dataclasses.field(default_factory=BufferPool)
    hooks: Hooks = dataclasses.field(default_factory=dict)
    clock: Clock = dataclasses.field(default_factory=Clock)


@dataclasses.dataclass(frozen=True)
class Given:
    """What a run may read.

    Args:
        tensors: the graph's tensor inputs by position, as far as the run reads them.
        shapes: theirs.
        seed: of the run.
        saved: what the forward kept for the backward.
        tangents: gradients of results, by position.
    """

    tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
    shapes: Shapes
    seed: int = 0
    saved: Sequence[torch.Tensor] = ()
    tangents: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)


class Session:
    """A phase, ready to run.

    Raises:
        SessionError: ONNX Runtime has no kernel for an operator, or refuses the model.
        TypeError: a torch node calls what is no operator.
    """

    def __init__(self, phase: Phase, options: SessionOptions) -> None:
        self._phase, self._pool, self._clock = phase, options.pool, options.clock
        self._sources = [source for _, source in phase.inputs]
        self._sizes: dict[tuple[tuple[int, ...], ...], tuple[list[int], list[torch.Tensor]]] = {}
        self._changes = bool(phase.terms) or any(source.kind == "sizes" for source in self._sources)
        self._converted = [(position, form) for position, form in enumerate(phase.forms) if form]
        self._engine = None
        if not phase.outputs and not phase.nodes:
            # All that the graph returns is there before it runs.
            return
        device = torch.device(phase.device)
        model = Model(
            phase.model,
            [options.clock.node(bind(node, options.hooks, device)) for node in phase.nodes],
            self._what_failed,
            [name for name, _ in phase.inputs],
            phase.outputs,
            device,
        )
        self._engine = options.engine.session(model, threads=options.threads, allow_spinning=options.allow_spinning)

    def run(self, given: Given) -> list[torch.Tensor]:
        """One run: the phase's outputs, in order.

        Raises:
            SessionError: a kernel refused its inputs.
        """
        if self._engine is None:
            return []
        numbers, vectors = self._sizes_for(given.shapes) if self._changes else ((), ())
        waiting = iter(vectors)
        tensors = [_input(source, given, waiting) for source in self._sources]
        with self._clock.running("sessions"):
            results = self._engine.run(tensors, RunState(self._pool, numbers, given.seed))
        for position, form in self._converted:
            results[position] = from_border(results[position], form)
        return results

    def _what_failed(self, index: int, error: BaseException) -> str:
        """What an error of a torch node calls where it came from: `aten.embedding in layers.0.embedding`."""
        node = self._phase.nodes[index]
        statement = failed_statement(node, error)
        if statement is None:
            return _operators(node)
        operator = statement.target.removesuffix(".default")
        return f"{operator} in {statement.module}" if statement.module else operator

    def _sizes_for(self, shapes: Shapes) -> tuple[list[int], list[torch.Tensor]]:
        key = tuple(tuple(shape) for shape in shapes)
        found = self._sizes.get(key)
        if found is None:
            vectors = [torch.tensor(values_of(s.terms, shapes)) for s in self._sources if s.kind == "sizes"]
            found = self._sizes[key] = (values_of(self._phase.terms, shapes), vectors)
        return found


def _input(source: Source, given: Given, vectors: Iterator[torch.Tensor]) -> torch.Tensor:
    if source.kind == "tensor":
        return to_border(given.tensors[source.index], source.form)
    if source.kind == "saved":
        return to_border(given.saved[source.index], source.form)
    if source.kind == "tangent":
        return to_border(given.tangents[source.index], source.form)
    if source.kind == "seed":
        return torch.tensor(given.seed)
    return next(vectors)


def _operators(node: TorchNode) -> str:
    """The first operators of a torch node."""
    names = [statement.target.removesuffix(".default") for statement in node.statements]
    shown = ", ".join(dict.fromkeys(names[:8]))
    return f"{shown}{' ...' if len(names) > 8 else ''}"
