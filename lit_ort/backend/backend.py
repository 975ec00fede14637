"""The Dynamo backend "ort": it turns an FX graph into a callable that runs sessions.

A graph is compiled at its first run, once for each set of sizes and numbers that Dynamo left symbolic in it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from lit_ort._compat.activation_checkpoints import keep_checkpoints
from lit_ort._compat.devices import device_of
from lit_ort._compat.dynamo_events import trace_in_context
from lit_ort._compat.fabric import keep_backward_checks
from lit_ort._compat.recurrent_shapes import shapes_without_steps
from lit_ort._compat.tensor_hooks import take_hooks, take_inputs
from lit_ort._compat.torch import have_tangents, unhooked
from lit_ort._compat.torch_distributed import has_collectives
from lit_ort._compat.torch_dynamo import (
    COMPILE_LOCK,
    ignore_traces_of_other_threads,
    keep_in_graph,
    mark_constant_result,
    skip_package,
)
from lit_ort._compat.torch_fx import forget_real_tensors
from lit_ort.backend.cache.content import Content, content_of
from lit_ort.backend.cache.store import GraphCache
from lit_ort.backend.compilation import Compilation, others_as_compile_errors
from lit_ort.backend.eager import FailedCheck, autocast_of, raise_for_failed_check, run_in_eager
from lit_ort.backend.events import DISABLED
from lit_ort.backend.executable import Executable, is_for, require_own_memory
from lit_ort.backend.explanation import CompileLog
from lit_ort.backend.forms import Forms
from lit_ort.backend.request import Request
from lit_ort.backend.tracing_settings import tracing_for
from lit_ort.backend.verify import Check
from lit_ort.capture.associative_scans import decompose_associative_scans
from lit_ort.capture.attributes import attributes_as_inputs
from lit_ort.capture.derivatives import refuse_derivatives
from lit_ort.capture.dimensions import changing_dimensions, changing_strides, layout_of
from lit_ort.capture.function_numbers import pass_tensors_of_numbers
from lit_ort.capture.inlined_checkpoints import inline_checkpoints
from lit_ort.capture.locations import first_line
from lit_ort.capture.numbers import NegativeLengthError, separate_numbers
from lit_ort.capture.trivial import computes
from lit_ort.errors import (
    CompileError,
    OptionsError,
    SessionError,
    SharedMemoryError,
    first_line_of,
    warn_at,
)
from lit_ort.options import AUTO, ORTOptions
from lit_ort.runtime.autograd import Call, bind_program
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.engines.choice import engine_of
from lit_ort.runtime.gradient_watches import inner_of, is_result, watch_of
from lit_ort.runtime.heap import keep_freed_memory
from lit_ort.runtime.latest import MOST_SIZES, Latest
from lit_ort.runtime.parameter_updates import HAND_OVER, Updates
from lit_ort.runtime.program import EAGER, Form
from lit_ort.runtime.report import GraphReport, Recompile, describe
from lit_ort.runtime.session import SessionOptions
from lit_ort.runtime.sizes import SIZE

# Metrics count their updates, cache results and read the values of tensors: if Dynamo traced them, nearly every call
# would need another graph. This is at module level because torch.compile imports a backend before it traces anything.
skip_package("torchmetrics")
# Dynamo takes a sixth of a second for each call, in which it traces how the pattern is read.
keep_in_graph("einops", "rearrange", "repeat", "einsum")
# At a model's first call the transformers library installs hooks under a lock, which would break the graph for good.
mark_constant_result("transformers.utils.output_capturing", "maybe_install_capturing_hooks")
ignore_traces_of_other_threads()
keep_checkpoints()
keep_backward_checks(DISABLED)
take_hooks(watch_of, is_result)
take_inputs(inner_of)

# Compiling one graph for this many signatures takes longer than most users expect.
MANY_SIGNATURES = 16
# A graph that could not be compiled for so many sizes, and for no other, runs in eager for all.
_REFUSALS = 2


class ORTBackend:
    """A backend for `torch.compile(..., backend=ORTBackend(options))` that keeps the executables it compiles.

    Args:
        options: all options of the engine.
        name: the name of its graphs in reports.
        compile_log: receives a report of every graph; a new one by default.
        pool: memory of torch nodes, shared by backends whose sessions run one after the other; a new one by default.
        updates: the optimizer of `optimizer_in_graph`, which a strategy sets.
        before_run: called before each run of a session.

    Raises:
        OptionsError: an unknown pass, an engine that is not installed, or `optimizer_in_graph` without an optimizer.
        EngineError: ONNX Runtime is not installed, or is installed twice.
    """

    def __init__(
        self,
        options: ORTOptions,
        name: str = "graph",
        compile_log: CompileLog | None = None,
        pool: BufferPool | None = None,
        updates: Updates | None = None,
        before_run: Callable[[], None] | None = None,
    ) -> None:
        _require_pass_names(options)
        if options.optimizer_in_graph and updates is None:
            raise OptionsError(
                "optimizer_in_graph=True needs an optimizer, and torch.compile has none. Leave it out, or train with "
                "Trainer(strategy=lit_ort.ORTStrategy(optimizer_in_graph=True))."
            )
        if options.keep_memory:
            keep_freed_memory()
        self.options = options
        self.engine = engine_of(options.engine)
        self.name = name
        self.compile_log = CompileLog() if compile_log is None else compile_log
        self._count = 0
        self._cache = None if options.cache_dir is None else GraphCache(options, self.engine)
        self._pool = BufferPool() if pool is None else pool
        self._updates, self._before_run = updates, before_run
        # Dynamo also recompiles for guards that don't change the graph; equal graphs share their sessions.
        self._executables: WeakValueDictionary[Any, Executable] = WeakValueDictionary()

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return CompiledGraph(self, graph_module) if computes(graph_module.graph) else graph_module.forward

    def tracing(self) -> AbstractContextManager[None]:
        """The context in which Dynamo traces a function of `torch.compile`."""
        return tracing_for(self.compile_log, strict=self.options.fallback == "error")

    @property
    def count(self) -> int:
        """The number of graphs that reached it."""
        return self._count

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTBackend:
        # torch.compile copies the backend of a module that it wraps; sessions and reports stay with this object.
        return self

    def executable(self, request: Request) -> Executable | None:
        """Return the executable for one call's sizes, compiled if necessary; None for a graph that runs in eager.

        Raises:
            CompileError: under `fallback="error"`, a graph that can't run through ONNX Runtime.
        """
        with COMPILE_LOCK, self.compile_log.watch.compiling(self.name):
            return self._executable_or_fallback(request)

    def _executable_or_fallback(self, request: Request) -> Executable | None:
        start, reason = perf_counter(), None
        if request.any_sizes:
            try:
                return self._executable_for(request, start)
            except CompileError as error:
                reason = str(error)
                request = dataclasses.replace(request, any_sizes=False)
        try:
            return self._executable_for(request, start, fixed_sizes=reason)
        except CompileError as error:
            if self.options.fallback == "error":
                raise
            self.fall_back(request.original.graph, request.tensors, start, str(error))
            return None

    def fall_back(self, graph: fx.Graph, tensors: Sequence[torch.Tensor], start: float, reason: str) -> None:
        """Reports a graph that runs in eager, with one warning for each reason and place.

        Args:
            graph: Dynamo's graph.
            tensors: its inputs.
            start: when its compilation began, by `time.perf_counter`, in seconds.
            reason: why it runs in eager, with a remedy.
        """
        name, place = f"{self.name}_{self._count}", first_line(graph)
        described = reason if place is None else f"{reason} (The graph begins at {place}.)"
        self._report(_fallback_report(name, tensors, described, self.options.precision), start)
        if self.compile_log.is_new(described):
            warn_at(place, f"{name} runs in eager PyTorch: {reason}")

    def _executable_for(self, request: Request, start: float, fixed_sizes: str | None = None) -> Executable:
        content = content_of(request)
        executable = None if content.digest is None else self._executables.get(content.digest)
        if executable is not None and executable.serves(request.tensors):
            return executable
        name = f"{self.name}_{self._count}"
        forms = self._forms(request)
        compilation, call = self._cached(content, request, forms) or self._built(request, name, content, forms)
        require_own_memory(compilation.program.signature, request.tensors)
        self._report(dataclasses.replace(compilation.report, name=name, fixed_sizes=fixed_sizes), start)
        self._hint(name, compilation.report.speed)
        signature = compilation.program.signature
        executable = Executable(signature, call, forms)
        if self.options.verifies:
            checked = call if self._updates is None else self._bound(compilation, forms, updates=False)
            twin = Executable(signature, checked, forms)
            executable.check = Check(twin, request.graph, request.original, name, self.options, self.compile_log)
        if content.digest is not None:
            self._executables[content.digest] = executable
        return executable

    def _report(self, report: GraphReport, start: float) -> None:
        self._count += 1
        seconds = perf_counter() - start
        self.compile_log.graphs.append(dataclasses.replace(report, seconds=seconds, engine=self.engine.version))

    def _hint(self, name: str, speed: str | None) -> None:
        if speed is not None and self.compile_log.is_new(speed):
            logging.getLogger("lit_ort").info("lit_ort: the speed of %s is %s", name, speed)

    def _cached(self, content: Content, request: Request, forms: Forms) -> tuple[Compilation, Call] | None:
        compilation = None if self._cache is None else self._cache.read(content)
        if self._cache is None or compilation is None or not is_for(compilation.program.signature, request.tensors):
            return None
        try:
            call = self._bound(compilation, forms)
        except (SessionError, TypeError) as error:
            self._cache.refuse(content, error)
            return None
        return _reported(compilation, cache="read"), call

    def _built(self, request: Request, name: str, content: Content, forms: Forms) -> tuple[Compilation, Call]:
        compilation = self._compiled(request, name)
        call = self._bound(compilation, forms)
        if self._cache is not None:
            compilation = _reported(compilation, cache=self._cache.write(content, compilation))
        return compilation, call

    def _compiled(self, request: Request, name: str) -> Compilation:
        # These imports take as long as building a small graph, and a cached graph needs none of them.
        from lit_ort.backend.build import build

        with request.modes(), unhooked(), shapes_without_steps():
            return build(
                request.graph,
                request.tensors,
                request.keys,
                self.options,
                name,
                self.engine,
                any_sizes=request.any_sizes,
                form=request.form,
            )

    def _bound(self, compilation: Compilation, forms: Forms, updates: bool = True) -> Call:
        """Creates a program's sessions and wraps them for autograd."""
        optimizer = None
        if self.options.optimizer_in_graph:
            optimizer = self._updates if updates and self._updates is not None else Updates(self._pool)
        hooks = {} if optimizer is None else {HAND_OVER: optimizer.hand_over}
        return bind_program(compilation.program, self._session_options(hooks), forms=forms, updates=optimizer)

    def _session_options(self, hooks: Mapping[str, Callable[..., Any]]) -> SessionOptions:
        return SessionOptions(
            engine=self.engine,
            threads=self.options.threads or torch.get_num_threads(),
            allow_spinning=self.options.allow_spinning,
            pool=self._pool,
            hooks=hooks,
            clock=self.compile_log.clock,
            before_run=self._before_run,
        )

    def _forms(self, request: Request) -> Forms:
        """The other forms of a graph, compiled or run when a gradient needs one."""
        # The template has no tensors, which would stay in memory.
        template = dataclasses.replace(request, tensors=())

        def bind(form: Form, tensors: Sequence[torch.Tensor]) -> Executable:
            with COMPILE_LOCK, self.compile_log.watch.compiling(self.name):
                return self._executable_for(
                    dataclasses.replace(template, tensors=tensors, form=form, any_sizes=False), perf_counter()
                )

        def run_in_eager_mode(tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
            with dataclasses.replace(template, tensors=tensors).modes():
                arguments = template.graph.module_arguments(tensors, template.keys)
                return run_in_eager(template.graph.module, arguments, self.options.precision)

        def fall_back(reason: str, tensors: Sequence[torch.Tensor]) -> None:
            self.fall_back(template.original.graph, tensors, perf_counter(), reason)

        # With the optimizer in the graph, a fused run would consume gradients.
        can_be_fused = request.form is None and not self.options.optimizer_in_graph
        allowed = None if self.options.fallback == "error" else fall_back
        return Forms(template.graph.module.graph, can_be_fused, bind, run_in_eager_mode, allowed)


class CompiledGraph:
    """The callable that Dynamo calls instead of a graph.

    Args:
        backend: compiles the graph.
        graph_module: Dynamo's graph.
    """

    def __init__(self, backend: ORTBackend, graph_module: fx.GraphModule) -> None:
        self._backend = backend
        decompose_associative_scans(graph_module)
        pass_tensors_of_numbers(graph_module)
        self._original, self._attributes = attributes_as_inputs(graph_module)
        self._compiled = 0
        # What was compiled, or runs in eager; and what serves other sizes than it was compiled for.
        self._executables: dict[tuple[Any, ...], Executable | None] = {}
        self._served: Latest[tuple[Any, ...], Executable] = Latest(MOST_SIZES)
        self._refused = 0
        self._form: Form | None = None
        self._warned = False
        # Raised at the first run; during tracing Dynamo would report it as an error in Dynamo.
        self._obstacle: CompileError | None = None
        try:
            with others_as_compile_errors():
                refuse_derivatives(self._original.graph)
                self._separate_numbers(lengths=backend.options.dynamic == AUTO)
        except CompileError as error:
            self._obstacle = error

    def _separate_numbers(self, lengths: bool) -> None:
        """Prepares the graph for its numbers; what was compiled for others ends.

        Args:
            lengths: compile for any value of an int that is used as a size, instead of for each.
        """
        self._graph = separate_numbers(inline_checkpoints(self._original), lengths)
        self._resized = sorted(changing_dimensions(self._graph.module))
        self._restrided = changing_strides(self._graph.module)
        self._any_sizes = self._backend.options.dynamic == AUTO and bool(self._resized)
        self._executables.clear()
        self._served.clear()

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._run((*arguments, *self._attributes))
        except FailedCheck as failed:
            return failed.outputs

    def _run(self, arguments: Sequence[Any]) -> Any:
        if self._obstacle is not None:
            return self._without_graph(self._obstacle, arguments)
        try:
            tensors, keys, numbers = self._graph.arguments(arguments)
        except NegativeLengthError:
            self._separate_numbers(lengths=False)
            tensors, keys, numbers = self._graph.arguments(arguments)
        if have_tangents(tensors):
            return self._without_graph(_forward_mode(), arguments)
        # As text, since 0.0 and -0.0 are equal, and nan is not equal to itself.
        shapes = tuple([tensors[position].shape for position in self._resized])
        key = (tuple(map(repr, keys)), shapes, tuple([layout_of(tensors[position]) for position in self._restrided]))
        executable = self._executables.get(key, _UNKNOWN)
        if executable is _UNKNOWN:
            executable = self._served.get(key) or self._compiled_for(key, tensors) or self._new(key, keys, tensors)
        if executable is not None and executable.wanted is not None:
            executable = self._in_form(executable.wanted, key, keys, tensors)
        if executable is None:
            return self._in_eager(arguments)
        try:
            if executable.check is not None:
                executable.check.before_run(arguments)
            return executable(tensors, numbers)
        except SharedMemoryError as error:
            if self._must_raise:
                raise
            if not self._warned:
                self._warned = True
                self._backend.fall_back(self._original.graph, tensors, perf_counter(), str(error))
            return self._in_eager(arguments)
        except SessionError as error:
            # No input has been changed yet, unless an optimizer has used gradients in the run.
            if self._must_raise or self._backend.options.optimizer_in_graph:
                raise_for_failed_check(self._original, arguments, self._backend.options.precision)
                raise
            try:
                results = self._in_eager(arguments)
            except (IndexError, RuntimeError) as own:
                # The step's inputs are at fault, and the session's error names the operator.
                raise type(own)(f"{error} Eager: {first_line_of(own)}") from own
            self._backend.fall_back(self._original.graph, tensors, perf_counter(), str(error))
            self._executables[key] = None
            return results

    @property
    def _must_raise(self) -> bool:
        """Whether a session's error ends the run: other ranks would not run a graph with collectives once more."""
        return self._backend.options.fallback == "error" or has_collectives(self._original.graph)

    def _in_form(
        self, form: Form, key: tuple[Any, ...], keys: tuple[Any, ...], tensors: Sequence[torch.Tensor]
    ) -> Executable | None:
        """The executable of the form that gradients called for; None for eager, at this and all other signatures."""
        self._form, self._compiled = form, 0
        self._executables.clear()
        self._served.clear()
        return self._compile(key, keys, tensors)

    def _without_graph(self, obstacle: CompileError, arguments: Sequence[Any]) -> Any:
        """Runs a graph or a call in eager for which nothing can be compiled."""
        if self._backend.options.fallback == "error":
            raise obstacle
        if not self._warned:
            self._warned = True
            tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
            self._backend.fall_back(self._original.graph, tensors, perf_counter(), str(obstacle))
        return self._in_eager(arguments)

    def _in_eager(self, arguments: Sequence[Any]) -> Any:
        with self._backend.compile_log.clock.running("eager"):
            return run_in_eager(self._original, arguments, self._backend.options.precision)

    def _compiled_for(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Executable | None:
        """An executable that was compiled for other sizes and supports these too."""
        numbers, _, layouts = key
        # Other threads can add to it.
        for (other_numbers, _, other_layouts), executable in list(self._executables.items()):
            if (other_numbers, other_layouts) == (numbers, layouts) and executable is not None:
                if executable.changes_size and executable.serves(tensors):
                    self._served[key] = executable
                    return executable
        return None

    def _request(self, tensors: Sequence[torch.Tensor], keys: tuple[Any, ...]) -> Request:
        return Request(
            self._graph,
            self._original,
            tensors,
            keys,
            self._any_sizes,
            self._form,
            gradients=torch.is_grad_enabled(),
            autocast=autocast_of(self._backend.options.precision, device_of(tensors)),
        )

    def _new(self, key: tuple[Any, ...], keys: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Executable | None:
        """An executable for other sizes or numbers, in the form that gradients of earlier ones called for."""
        forms = (known.wanted for known in list(self._executables.values()) if known is not None)
        wanted = next((form for form in forms if form is not None), None)
        return self._compile(key, keys, tensors) if wanted is None else self._in_form(wanted, key, keys, tensors)

    def _compile(
        self, key: tuple[Any, ...], keys: tuple[Any, ...], tensors: Sequence[torch.Tensor]
    ) -> Executable | None:
        if (self._form is not None and self._form.kind == EAGER) or self._has_many_numbers(key):
            return None
        # Dynamo has finished tracing when a graph runs.
        forget_real_tensors(self._original.graph)
        executable = self._executables[key] = self._backend.executable(self._request(tensors, keys))
        self._refused += executable is None
        if self._refused == len(self._executables) == _REFUSALS:
            # Other sizes would be refused for the same reason, each after the time of a trace.
            self._form = Form(EAGER)
        # If one size can't be compiled for any size, the next one can't either.
        self._any_sizes = self._any_sizes and executable is not None and executable.changes_size
        self._compiled += 1
        if self._compiled > 1:
            self._note_recompile(key)
        if self._compiled == MANY_SIGNATURES:
            self._warn_of_many(key)
        if self._graph.lengths and (executable is None or not self._changes_lengths(executable, tensors)):
            self._separate_numbers(lengths=False)
        return executable

    def _changes_lengths(self, executable: Executable, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether an executable is for any value of the ints that are sizes, but for those that broadcast."""
        positions = [k for k in self._graph.length_inputs if tensors[k].shape[0] > 1]
        fixed = {("equal", (SIZE, k, 0), tensors[k].shape[0]) for k in positions}
        return executable.changes_size and fixed.isdisjoint(executable.signature.sizes or ())

    def _has_many_numbers(self, key: tuple[Any, ...]) -> bool:
        """Whether a graph that was compiled for many numbers would be compiled for another one."""
        numbers = {known for known, *_ in self._executables}
        return key[0] not in numbers and len(numbers) >= MANY_SIGNATURES

    def _note_recompile(self, key: tuple[Any, ...]) -> None:
        place = first_line(self._original.graph)
        if place is not None:
            name = self._backend.name
            self._backend.compile_log.note_recompile(
                Recompile(name, name, place, f"sizes or numbers are now {self._described(key)}.", _FEWER_SIZES)
            )

    def _warn_of_many(self, key: tuple[Any, ...]) -> None:
        warn_at(
            first_line(self._original.graph),
            f"{self._backend.name} was compiled for {MANY_SIGNATURES} different sizes or numbers, the latest "
            f"{self._described(key)}, and each compilation takes a second or more. With more numbers it runs in eager. "
            f"{_FEWER_SIZES}",
        )

    def _described(self, key: tuple[Any, ...]) -> str:
        """The sizes and numbers of a call."""
        numbers, shapes, _ = key
        lengths = self._graph.length_inputs
        sizes = (shape[0] if k in lengths else list(shape) for k, shape in zip(self._resized, shapes, strict=True))
        return ", ".join(map(str, (*numbers, *sizes)))


def _forward_mode() -> CompileError:
    return CompileError(
        "an input has a tangent (torch.autograd.forward_ad), and sessions compute gradients in reverse mode alone",
        remedy="Exclude this function from the graphs with torch.compiler.disable, or call torch.func.jvp in it.",
    )


# No executable has been sought yet; None is the choice of eager.
_UNKNOWN: Any = object()
_FEWER_SIZES = "Pad or bucket batches to fewer sizes, and pass changing numbers as tensors."


def ort(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend of `torch.compile(..., backend="ort", options={...})`, whose options are those of `ORTOptions`."""
    return _backend_named_ort(options)(graph_module, example_inputs)


def _backend_named_ort(options: Mapping[str, Any] | None) -> ORTBackend:
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()}
    return _backend_of(ORTOptions.from_mapping(frozen))


@functools.cache
def _backend_of(options: ORTOptions) -> ORTBackend:
    """One backend for equal options, as Dynamo calls a named backend again for every graph."""
    return ORTBackend(options)


def _tracing_of(backend: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[None] | None:
    """The context in which Dynamo traces for a backend; None for a backend that is not lit_ort's.

    An error in the options of `torch.compile` is raised here, before Dynamo could make it one of its own.
    """
    if backend is ort:
        if unknown := sorted(arguments.keys() - {"options"}):
            raise OptionsError(
                f"torch.compile({unknown[0]}={arguments[unknown[0]]!r}) is not for backend='ort'. Leave it out, or "
                "pass options={...} with fields of lit_ort.ORTOptions."
            )
        backend = _backend_named_ort(arguments.get("options"))
    return backend.tracing() if isinstance(backend, ORTBackend) else None


trace_in_context(_tracing_of)


def _require_pass_names(options: ORTOptions) -> None:
    if options.disable_passes:
        from lit_ort.backend.build import require_pass_names

        require_pass_names(options.disable_passes)


def _reported(compilation: Compilation, cache: str) -> Compilation:
    return dataclasses.replace(compilation, report=dataclasses.replace(compilation.report, cache=cache))


def _fallback_report(name: str, tensors: Sequence[torch.Tensor], reason: str, precision: str) -> GraphReport:
    gradients = sum(tensor.requires_grad for tensor in tensors)
    shapes = tuple(describe(f"input {k}", t) for k, t in enumerate(tensors) if not isinstance(t, torch.nn.Parameter))
    return GraphReport(name, "eager", len(tensors), gradients, shapes, {}, {}, (), 0.0, reason, precision=precision)
