"""The Dynamo backend "ort": an FX graph in, a callable that runs sessions out.

A graph is compiled at its first run, once for each set of sizes and numbers that Dynamo left symbolic in it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from lit_ort.compiler.autocast import float32_of, in_float32, run_in_eager
from lit_ort.compiler.cache import GraphCache
from lit_ort.compiler.checkpoints import inline_checkpoints
from lit_ort.compiler.conditions import hold
from lit_ort.compiler.content import Content, content_of
from lit_ort.compiler.kernels import KERNELS
from lit_ort.compiler.kernels.torch_call import TorchCalls
from lit_ort.compiler.numbers import settle_numbers, size_symbols
from lit_ort.compiler.signature import Compilation, GraphOutput, StepSignature, describe, tensors_of
from lit_ort.compiler.verify import require_agreement, without_dropout
from lit_ort.errors import CompileError, LitOrtWarning, OptionsError, SessionError
from lit_ort.inspect import CompileLog, GraphReport
from lit_ort.options import AUTO, ORTOptions
from lit_ort.runtime.autograd import Call, forward_call, fused_call, split_call
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.random import draw_from
from lit_ort.runtime.session import Session, SessionOptions, SplitSession
from lit_ort.runtime.updates import HAND_OVER, Updates

# Compiling for this many signatures of one graph takes longer than most users expect of a run.
MANY_SIGNATURES = 16


class ORTBackend:
    """A backend for `torch.compile(..., backend=ORTBackend(options))` that keeps what it compiled.

    Args:
        options: every choice of the engine.
        name: what its graphs are called in reports.
        compile_log: receives a report of every graph; a new one by default.
        pool: memory of torch kernels, shared by backends whose sessions run one after the other; its own by default.
        updates: the optimizer of `optimizer_in_graph`, which a strategy knows.

    Raises:
        OptionsError: an unknown pass, or `optimizer_in_graph` without an optimizer.
    """

    def __init__(
        self,
        options: ORTOptions,
        name: str = "graph",
        compile_log: CompileLog | None = None,
        pool: BufferPool | None = None,
        updates: Updates | None = None,
    ) -> None:
        _require_pass_names(options)
        if options.optimizer_in_graph and updates is None:
            raise OptionsError(
                "optimizer_in_graph=True, and torch.compile knows of no optimizer. Leave it out, or train with "
                "Trainer(strategy=lit_ort.ORTStrategy(optimizer_in_graph=True))."
            )
        self.options = options
        self.name = name
        self.compile_log = CompileLog() if compile_log is None else compile_log
        self._count = 0
        self._cache = None if options.cache_dir is None else GraphCache(options)
        self._pool = BufferPool() if pool is None else pool
        self._updates = updates
        # Dynamo compiles anew for guards that don't change the graph; equal graphs share their sessions.
        self._executables: WeakValueDictionary[Any, Executable] = WeakValueDictionary()

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return CompiledGraph(self, graph_module)

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTBackend:
        # torch.compile copies the backend of a module it wraps; sessions and reports stay with this one.
        return self

    def executable(self, graph_module: fx.GraphModule, arguments: Sequence[Any], any_sizes: bool = False) -> Executable:
        """Compiles a graph for one call's sizes, or finds it compiled.

        Args:
            any_sizes: for as many other sizes as it can be right for; where that fails, for this call's.

        Raises:
            CompileError: under `fallback="error"`, what keeps the graph from ONNX Runtime.
        """
        start, reason = time.perf_counter(), None
        if any_sizes:
            try:
                return self._found_or_made(graph_module, arguments, start, any_sizes=True)
            except CompileError as error:
                reason = str(error)
        try:
            return self._found_or_made(graph_module, arguments, start, fixed_sizes=reason)
        except CompileError as error:
            if self.options.fallback == "error":
                raise
            return self._in_eager(arguments, start, str(error))

    def _found_or_made(
        self,
        graph_module: fx.GraphModule,
        arguments: Sequence[Any],
        start: float,
        any_sizes: bool = False,
        fixed_sizes: str | None = None,
    ) -> Executable:
        content = content_of(graph_module, arguments, any_sizes)
        found = None if content.digest is None else self._executables.get(content.digest)
        if found is not None and found.serves(tensors_of(arguments)):
            return found
        name = f"{self.name}_{self._count}"
        made = self._cached(content, arguments) or self._built(graph_module, arguments, name, content, any_sizes)
        compilation, call = made
        self._report(dataclasses.replace(compilation.report, name=name, fixed_sizes=fixed_sizes), start)
        check = (
            Check(compilation, graph_module, name, self.options, self.compile_log) if self.options.verifies else None
        )
        executable = Executable(compilation.signature, call, check)
        if content.digest is not None:
            self._executables[content.digest] = executable
        return executable

    def _in_eager(self, arguments: Sequence[Any], start: float, reason: str) -> Executable:
        name = f"{self.name}_{self._count}"
        self._report(_fallback_report(name, arguments, reason, self.options.precision), start)
        warnings.warn(f"{name} runs in eager PyTorch: {reason}", LitOrtWarning, stacklevel=2)
        return Executable(None, None)

    def _report(self, report: GraphReport, start: float) -> None:
        self._count += 1
        self.compile_log.graphs.append(dataclasses.replace(report, seconds=time.perf_counter() - start))

    def _cached(self, content: Content, arguments: Sequence[Any]) -> tuple[Compilation, Call] | None:
        found = None if self._cache is None else self._cache.read(content)
        if self._cache is None or found is None or not is_for(found.signature, tensors_of(arguments)):
            return None
        try:
            call = bind(found, self.options, self._pool, self._updates)
        except SessionError as error:
            self._cache.refuse(content, error)
            return None
        return _reported(found, cache="read"), call

    def _built(
        self, graph_module: fx.GraphModule, arguments: Sequence[Any], name: str, content: Content, any_sizes: bool
    ) -> tuple[Compilation, Call]:
        # What building imports takes as long as a small graph, and a cached graph needs none of it.
        from lit_ort.compiler.build import build

        compilation = build(graph_module, arguments, self.options, name, any_sizes)
        call = bind(compilation, self.options, self._pool, self._updates)
        if self._cache is not None:
            compilation = _reported(compilation, cache=self._cache.write(content, compilation))
        return compilation, call


class CompiledGraph:
    """What Dynamo calls in place of a graph."""

    def __init__(self, backend: ORTBackend, graph_module: fx.GraphModule) -> None:
        self._backend = backend
        self._original = graph_module
        self._graph = settle_numbers(inline_checkpoints(graph_module))
        placeholders = [node for node in self._graph.module.graph.nodes if node.op == "placeholder"]
        sizes = size_symbols(placeholders) if backend.options.dynamic == AUTO else {}
        self._numbers = [
            position
            for position, node in enumerate(placeholders)
            if node.users and not isinstance(node.meta.get("example_value"), torch.Tensor)
            if str(node.meta.get("example_value")) not in sizes
        ]
        self._tensors = [
            position
            for position, node in enumerate(placeholders)
            if isinstance(node.meta.get("example_value"), torch.Tensor)
        ]
        self._resized = [position for position in self._tensors if _has_symbolic_sizes(placeholders[position])]
        self._any_sizes = bool(sizes)
        self._compiled = 0
        self._executables: dict[tuple[Any, ...], Executable] = {}

    def __call__(self, *arguments: Any) -> Any:
        given = self._graph.convert(arguments) if self._graph.conversions else arguments
        numbers = tuple(given[position] for position in self._numbers)
        tensors = [given[position] for position in self._tensors]
        key = (numbers, tuple(given[position].shape for position in self._resized))
        executable = self._executables.get(key)
        if executable is None:
            executable = self._executables[key] = self._find(numbers, tensors) or self._compile(given, key)
        if executable.eager:
            return run_in_eager(self._original, arguments, self._backend.options.precision)
        if executable.check is not None:
            executable.check.before_run(given)
        outputs = executable(tensors)
        if self._graph.returns is None:
            return outputs
        returned = dict(zip(self._graph.returned, self._graph.returns(*arguments), strict=True))
        return tuple(returned.get(position, output) for position, output in enumerate(outputs))

    def _find(self, numbers: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Executable | None:
        """What was compiled for other sizes, and serves these."""
        for (same_numbers, _), found in self._executables.items():
            if same_numbers == numbers and found.changes_size and found.serves(tensors):
                return found
        return None

    def _compile(self, given: Sequence[Any], key: tuple[Any, ...]) -> Executable:
        executable = self._backend.executable(self._graph.module, given, self._any_sizes)
        # Where one size fails to be any, the next one would.
        self._any_sizes = self._any_sizes and executable.changes_size
        self._compiled += 1
        if self._compiled == MANY_SIGNATURES:
            self._warn_of_many(key)
        return executable

    def _warn_of_many(self, latest: tuple[Any, ...]) -> None:
        described = (str(part) for group in latest for part in group)
        warnings.warn(
            f"{self._backend.name} was compiled for {MANY_SIGNATURES} different sizes or numbers, the latest "
            f"{', '.join(described)}, and each takes a second or more. Pad or bucket batches to fewer sizes, "
            "and pass changing numbers as tensors.",
            LitOrtWarning,
            stacklevel=2,
        )


class Executable:
    """A graph at one signature: hands the graph's tensors to a session and gathers the graph's outputs.

    Args:
        signature: None for a graph that runs in eager.
        call: the session.
        check: what compares its runs with eager; None where nothing does.
    """

    def __init__(self, signature: StepSignature | None, call: Call | None, check: Check | None = None) -> None:
        self.check = check
        self._outputs = () if signature is None else signature.outputs
        self._changes = () if signature is None else signature.changes
        self._bf16 = signature is not None and signature.bf16
        self._signature = signature
        self._call = call

    @property
    def eager(self) -> bool:
        return self._call is None

    @property
    def changes_size(self) -> bool:
        """Whether it may serve other sizes than those that it was compiled at."""
        return self._signature is not None and self._signature.sizes is not None

    def serves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it is right for inputs of these sizes, as far as they may change."""
        return self._signature is None or is_for(self._signature, tensors)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        assert self._call is not None
        results = self._call([float32_of(tensor) for tensor in tensors] if self._bf16 else tensors)
        with torch.no_grad():
            for position, result in self._changes:
                tensors[position].copy_(results[result])
        return tuple(_value_of(output, results, tensors) for output in self._outputs)


def _value_of(output: GraphOutput, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
    if output.source == "result":
        result = results[output.value]
        return result if output.dtype is None else result.to(output.dtype)
    if output.source == "input":
        return tensors[output.value]
    return output.value.clone() if isinstance(output.value, torch.Tensor) else output.value


def is_for(signature: StepSignature, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether inputs meet the conditions on sizes under which a graph is right."""
    return signature.sizes is None or hold(signature.sizes, [tensor.shape for tensor in tensors])


def bind(compilation: Compilation, options: ORTOptions, pool: BufferPool, updates: Updates | None = None) -> Call:
    """Makes a model's session and wraps it for autograd."""
    signature, training = compilation.signature, compilation.training
    updates = (updates or Updates(pool)) if options.optimizer_in_graph else None
    session_options = SessionOptions(
        threads=options.threads or torch.get_num_threads(),
        allow_spinning=options.allow_spinning,
        kernels={
            **KERNELS,
            **TorchCalls(signature.functions).kernels,
            **({} if updates is None else {HAND_OVER: updates.kernel}),
        },
        pool=pool,
    )
    if compilation.kind == "split":
        split = SplitSession(training.model, signature.input_names, len(training.results), session_options)
        return split_call(
            split,
            signature.wants_gradient,
            training.gradient_positions,
            signature.result_differentiable,
            training.yielded,
        )
    outputs = [*training.results, *training.gradient_outputs]
    session = Session(training.model, signature.input_names, outputs, session_options)
    if compilation.kind == "forward":
        return forward_call(session)
    loss = signature.result_differentiable.index(True)
    return fused_call(session, signature.wants_gradient, training.gradient_positions, loss, updates)


class Check:
    """Compares runs of a graph with eager, dropout off in both: the first one, and every n-th where that is asked for.

    Args:
        compilation, graph_module: the graph, compiled and as it was.
        name: of the graph, for messages.
        options: which runs, and what tolerance.
        compile_log: keeps the outcome.
    """

    def __init__(
        self,
        compilation: Compilation,
        graph_module: fx.GraphModule,
        name: str,
        options: ORTOptions,
        compile_log: CompileLog,
    ) -> None:
        self._compilation = compilation
        self._graph_module = graph_module
        self._name = name
        self._options = options
        self._compile_log = compile_log
        self._runs = 0
        self._twin: Executable | None = None

    def before_run(self, arguments: Sequence[Any]) -> None:
        """Counts a run, and compares where its turn has come. Nobody's random numbers are used up.

        Raises:
            VerificationError: with the worst offenders.
        """
        every = self._options.verify_every_n_steps
        if self._runs == 0 or (every is not None and self._runs % every == 0):
            with torch.random.fork_rng(devices=[]), draw_from(torch.Generator()):
                worst = self._compare(arguments)
            self._compile_log.note_verification(self._name, worst)
        self._runs += 1

    def _compare(self, arguments: Sequence[Any]) -> tuple[str, ...]:
        graph, precision, signature = self._graph_module, self._options.precision, self._compilation.signature
        twin = self._twin or self._without_dropout()
        if self._options.verify_every_n_steps is not None:
            self._twin = twin
        return require_agreement(
            lambda *given: run_in_eager(graph, given, precision),
            lambda *given: twin(tensors_of(given)),
            arguments,
            names=signature.input_names,
            tolerance=self._options.verify_tolerance,
            graph=self._name,
            exact=(lambda *given: in_float32(graph, given)) if signature.bf16 else None,
        )

    def _without_dropout(self) -> Executable:
        training = self._compilation.training
        training = dataclasses.replace(training, model=without_dropout(training.model))
        call = bind(dataclasses.replace(self._compilation, training=training), self._options, BufferPool())
        return Executable(self._compilation.signature, call)


def ort(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend behind `torch.compile(..., backend="ort", options={...})`; options are those of `ORTOptions`."""
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()}
    return _Lazy(graph_module, frozen)


class _Lazy:
    """Reads the options at the first run, so that a wrong one raises as itself rather than inside Dynamo's report."""

    def __init__(self, graph_module: fx.GraphModule, options: Mapping[str, Any]) -> None:
        self._graph_module = graph_module
        self._options = options
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            backend = _backend_of(ORTOptions.from_mapping(self._options))
            self._compiled = backend(self._graph_module, arguments)
        return self._compiled(*arguments)


@functools.cache
def _backend_of(options: ORTOptions) -> ORTBackend:
    """One backend for equal options, as Dynamo calls a named backend anew for every graph."""
    return ORTBackend(options)


def _require_pass_names(options: ORTOptions) -> None:
    if options.disable_passes:
        from lit_ort.compiler import passes

        passes.require_names(options.disable_passes)


def _reported(compilation: Compilation, cache: str) -> Compilation:
    return dataclasses.replace(compilation, report=dataclasses.replace(compilation.report, cache=cache))


def _has_symbolic_sizes(placeholder: fx.Node) -> bool:
    return any(isinstance(size, torch.SymInt) for size in placeholder.meta["example_value"].shape)


def _fallback_report(name: str, arguments: Sequence[Any], reason: str, precision: str) -> GraphReport:
    tensors = tensors_of(arguments)
    wants = sum(tensor.requires_grad for tensor in tensors)
    shapes = tuple(describe(f"input {k}", t) for k, t in enumerate(tensors) if not isinstance(t, torch.nn.Parameter))
    return GraphReport(name, "eager", len(tensors), wants, shapes, {}, {}, (), 0.0, reason, precision=precision)
