"""Private interfaces of Dynamo: its reports of graph breaks, recompiles and functions that it leaves in eager.

Dynamo writes them to logs that are off by default (`TORCH_LOGS=graph_breaks,recompiles`). Here a listener receives
them. The hooks are installed once for the process, and do nothing while there is no listener. A backend can listen
while Dynamo traces functions for it, also if it is used by `torch.compile` alone.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import CodeType
from typing import Any, Protocol

import torch._dynamo.convert_frame
import torch._dynamo.utils
from torch._C._dynamo.eval_frame import (
    _debug_get_cache_entry_list,
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import cached_backends, innermost_backend
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import ExactWeakKeyDictionary
from torch._dynamo.variables import TensorVariable

from lit_ort._compat.bound_builtin_methods import keep_bound_methods
from lit_ort._compat.container_writes import keep_writes
from lit_ort._compat.expected_branches import keep_expected_branches
from lit_ort._compat.gradient_leaves import keep_leaves
from lit_ort._compat.input_values import keep_input_values
from lit_ort._compat.integer_indices import INTEGER_INDICES, keep_integer_indices
from lit_ort._compat.metric_calls import is_of_metric, keep_metric_calls
from lit_ort._compat.number_conditions import keep_conditions
from lit_ort._compat.numpy_scalars import keep_numbers
from lit_ort._compat.packed_sequences import PACKED
from lit_ort._compat.pandas_lookups import keep_lookups
from lit_ort._compat.problem_types import keep_problem_types
from lit_ort._compat.random_objects import keep_draws
from lit_ort._compat.selections import keep_selections
from lit_ort._compat.symbolic_math import keep_functions
from lit_ort._compat.torch_dynamo import (
    COMPILE_LOCK,
    FRAME_LOGGER,
    SCALAR_LOGGER,
    is_recompile_limit,
    is_scalar_advice,
    suppressed_error,
)
from lit_ort._compat.unread_lists import keep_unread_lists
from lit_ort._compat.value_checks import keep_checks
from lit_ort.errors import first_line_of, place_in_package

# File and line of each call from the compiled function to a statement, the outermost first.
Stack = tuple[tuple[str, int], ...]

# Torch's names (`gb_type`) for obstacles.
RECOMPILE_LIMIT = "Dynamo recompile limit exceeded"
BRANCH = "Data-dependent branching"
EXCEPTION = "Observed exception"

# In reports about obstacles that leave the whole function in eager, which is an event itself.
_LEAVES_FUNCTION = ("Failed to handle graph break gracefully", "Skipping frame due to graph break")
_STOPS = "that we cannot resume from"
_DUPLICATE_WARNING = "Dynamo does not know how to trace the"
_NEXT_OBSTACLE = "*** While handling this graph break"
_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why Dynamo can't trace a statement.

    Args:
        kind: torch's name for it, the same wherever it occurs; the type of an exception that is not Dynamo's own.
        explanation: one line of torch's.
        hints: torch's, one line each.
        text: all of torch's message.
        stack: of the statement.
        is_error: whether it is an exception that Dynamo didn't expect.
        defect: where this package raised such an exception, or None.
    """

    kind: str
    explanation: str
    hints: tuple[str, ...]
    text: str
    stack: Stack
    is_error: bool = False
    defect: str | None = None


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that Dynamo traces, or what follows a graph break in one.

    Args:
        name: the function's.
        file, line: where it begins, or where it continues after the graph break.
        continues: whether a graph break is before it.
    """

    name: str
    file: str
    line: int
    continues: bool


class Listener(Protocol):
    """Receives the events of the functions that are compiled while it listens."""

    @property
    def rewind(self) -> Callable[[], None]:
        """Sets generators to their states before the latest run that drew from them."""
        ...

    def gradient_read(self) -> None:
        """A function reads the `grad` of a tensor."""
        ...

    def graph_break(self, obstacle: Obstacle, resumes: bool) -> None:
        """A graph ends at a statement. `resumes`: the code after it is compiled too."""
        ...

    def left_in_eager(self, obstacle: Obstacle, function: Function) -> None:
        """A function runs in eager, except for functions that it calls; at the recompile limit, only for new values.

        Any exception that it raises reaches the caller of the function.
        """
        ...

    def recompiled(self, function: Function, reason: str, stack: Stack) -> None:
        """A function is compiled again by the same backend. `reason`: the guard that failed, one line of torch's."""
        ...


# Of a backend and the keyword arguments that torch.compile passes to it: the context in which its functions are traced.
ContextOf = Callable[[Any, Mapping[str, Any]], AbstractContextManager[Any] | None]

# Only a thread that holds Dynamo's lock adds one.
_LISTENERS: list[Listener] = []

# The backends for which functions are traced, in threads that hold the lock.
_CONVERTING: list[Any] = []
# The code that was traced.
_TRACED = ExactWeakKeyDictionary()
# The code that Dynamo left in eager while a listener was there. It never traces it again, for any backend.
_LEFT_IN_EAGER = ExactWeakKeyDictionary()

_own_context: ContextVar[Callable[[], AbstractContextManager[None]] | None] = ContextVar(
    "lit_ort_tracing_context", default=None
)
_allows_compiling: ContextVar[Callable[[], bool] | None] = ContextVar("lit_ort_allows_compiling", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Sends Dynamo's events to a listener for as long as the block runs, and keeps its log lines about them back."""
    _install()
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.pop()


def trace_in_context(context_of: ContextOf) -> None:
    """Makes Dynamo enter a context while it traces a function, unless `traced_in` sets one or a listener is there.

    Args:
        context_of: returns the context for a backend, or None.
    """
    _enter_in_conversions(lambda own: context_of(*_backend_of(own)) if _own_context.get() is None else None)


@contextmanager
def traced_in(
    context: Callable[[], AbstractContextManager[None]], allows_compiling: Callable[[], bool] | None = None
) -> Iterator[None]:
    """While the block runs, Dynamo traces this thread's functions in a new context each.

    What the context changes in torch is changed while a function is traced, and under Dynamo's lock: other threads that
    run or trace meanwhile don't see it.

    Args:
        context: returns a new context.
        allows_compiling: whether a call that Dynamo has no code for is compiled. Otherwise it runs in eager, with
            everything that it calls.
    """
    _install()
    tokens = _own_context.set(context), _allows_compiling.set(allows_compiling)
    try:
        yield
    finally:
        _own_context.reset(tokens[0])
        _allows_compiling.reset(tokens[1])


def _enter_in_conversions(context_of: Callable[[Any], AbstractContextManager[Any] | None]) -> None:
    """Makes Dynamo trace under its lock, in the context for one of its callbacks, unless a listener is there."""
    catch_errors: Any = torch._dynamo.convert_frame.CatchErrorsWrapper
    convert = catch_errors.__call__

    def convert_in_context(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_declined(*args):
            return _IN_EAGER
        with COMPILE_LOCK:
            context = None if _LISTENERS else context_of(self)
            if (_LISTENERS or context is not None) and is_of_metric(args[0]):
                return _NEVER_COMPILED
            with nullcontext() if context is None else context, _converting(self, *args):
                return convert(self, *args, **kwargs)

    catch_errors.__call__ = convert_in_context


# A metric runs in eager, and what it calls: each of its methods would be a graph of a few operators.
_NEVER_COMPILED = ConvertFrameReturn(_FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
# Nothing is compiled for this call, nor for what it calls; the next call of the function can be.
_IN_EAGER = ConvertFrameReturn(_FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP), apply_to_code=False)


def _is_declined(frame: Any, *_: Any) -> bool:
    allows = _allows_compiling.get()
    return allows is not None and not trace_rules.check(frame.f_code) and not allows()


@contextmanager
def _converting(convert: Any, frame: Any, *_: Any) -> Iterator[None]:
    _TRACED[frame.f_code] = weakref.ref(frame.f_code)
    _CONVERTING.append(innermost_backend(convert))
    try:
        yield
    finally:
        _CONVERTING.pop()


def forget(backends: Iterable[Any]) -> None:
    """Drops what Dynamo has compiled for backends. It keeps that with the code of functions, which outlive them."""
    dropped = {id(backend) for backend in backends}
    for key, backend in list(cached_backends.items()):
        if id(_compiler_of(backend)) in dropped:
            cached_backends.pop(key, None)
    for reference in list(_TRACED.values.values()):
        code = reference()
        for entry in [] if code is None else _debug_get_cache_entry_list(code):
            if id(_compiler_of(entry.backend)) in dropped:
                guards: Any = entry.guard_manager
                guards.extra_state.invalidate(guards.cache_entry, DeletedGuardManagerWrapper("its backend is dropped"))


def has_code(backends: Iterable[Any]) -> bool:
    """Whether Dynamo has compiled code for backends, and has not been reset since."""
    known = {id(_compiler_of(backend)) for backend in cached_backends.values()}
    return any(id(backend) in known for backend in backends)


def trace_again() -> None:
    """Makes Dynamo trace what it left in eager while there was a listener, so that another listener learns of it."""
    with COMPILE_LOCK:
        for reference in list(_LEFT_IN_EAGER.values.values()):
            code = reference()
            if code is not None:
                set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT))
        _LEFT_IN_EAGER.clear()


def _context_of_thread(_: Any) -> AbstractContextManager[None] | None:
    context = _own_context.get()
    return None if context is None else context()


def _backend_of(convert: Any) -> tuple[Any, Mapping[str, Any]]:
    """The backend for which a function is traced, and the keyword arguments that torch.compile passes to it."""
    backend: Any = innermost_backend(convert)
    return _compiler_of(backend), getattr(backend, "kwargs", {})


def _compiler_of(backend: Any) -> Any:
    """A backend without the wrapper that torch.compile puts around those that are not inductor."""
    return getattr(backend, "compiler_fn", backend)


@functools.cache
def _install() -> None:
    """Puts the hooks into Dynamo, once for the process."""
    convert_frame: Any = torch._dynamo.convert_frame
    utils: Any = torch._dynamo.utils
    warn_once = utils.warn_once
    log_graph_break = InstructionTranslatorBase.log_graph_break
    recompile_reasons = convert_frame.get_and_maybe_log_recompilation_reasons
    cache_size = convert_frame.compute_cache_size
    format_error = convert_frame.format_error_msg
    read_gradient = TensorVariable.method_attr_grad

    def on_graph_break(self: Any, code_options: Any, reason: str, exc: Any) -> None:
        text = f"{reason} {getattr(exc, 'msg', '')}"
        if _LISTENERS and not exc.logged and not any(words in text for words in _LEAVES_FUNCTION):
            _LISTENERS[-1].graph_break(obstacle_of(exc), resumes=_STOPS not in reason)
        log_graph_break(self, code_options, reason, exc)

    def on_recompile(entries: Sequence[Any], frame: Any, backend: Any, *args: Any, **kwargs: Any) -> list[str]:
        reasons = recompile_reasons(entries, frame, backend, *args, **kwargs)
        # Another backend's code for the same function is no reason.
        own = [reason for entry, reason in zip(entries, reasons, strict=False) if entry.backend == backend]
        if _LISTENERS and own:
            first, _, rest = own[0].partition("\n")
            _LISTENERS[-1].recompiled(_function(frame.f_code), first.partition(": ")[2], _stack_in(rest))
        return reasons

    def on_cache_size(frame: Any, entries: Sequence[Any], *args: Any) -> Any:
        # Torch limits how often a function is compiled, and counts for all backends together.
        own = [entry for entry in entries if entry.backend == _CONVERTING[-1]] if _LISTENERS else entries
        return cache_size(frame, own, *args)

    def on_error(exc: Any, code: CodeType, *args: Any, **kwargs: Any) -> str:
        if _LISTENERS:
            _LEFT_IN_EAGER[code] = weakref.ref(code)
            _LISTENERS[-1].left_in_eager(obstacle_of(exc), _function(code))
        return format_error(exc, code, *args, **kwargs)

    def on_gradient(self: Any, tx: Any) -> Any:
        if _LISTENERS:
            _LISTENERS[-1].gradient_read()
        return read_gradient(self, tx)

    def on_warning(message: str, *args: Any, **kwargs: Any) -> None:
        if not _LISTENERS or not message.startswith(_DUPLICATE_WARNING):
            warn_once(message, *args, **kwargs)

    utils.warn_once = on_warning
    TensorVariable.method_attr_grad = on_gradient
    InstructionTranslatorBase.log_graph_break = on_graph_break
    convert_frame.get_and_maybe_log_recompilation_reasons = on_recompile
    convert_frame.compute_cache_size = on_cache_size
    convert_frame.format_error_msg = on_error
    for name in (FRAME_LOGGER, SCALAR_LOGGER):
        logging.getLogger(name).addFilter(_is_no_event)
    _enter_in_conversions(_context_of_thread)
    keep_writes(lambda: bool(_LISTENERS))
    # The last one comes first at an instruction.
    keep_expected_branches(_runs_can_be_dropped, lambda: _LISTENERS[-1].rewind)
    keep_input_values(lambda: bool(_LISTENERS))
    keep_checks(_runs_can_be_dropped)
    keep_metric_calls(lambda: bool(_LISTENERS))
    keep_numbers(lambda: bool(_LISTENERS))
    keep_functions(lambda: bool(_LISTENERS))
    keep_conditions(lambda: bool(_LISTENERS))
    keep_draws(lambda: bool(_LISTENERS))
    keep_bound_methods(lambda: bool(_LISTENERS))
    keep_leaves(lambda: bool(_LISTENERS))
    keep_lookups(lambda: bool(_LISTENERS))
    keep_selections(lambda: bool(_LISTENERS), PACKED, INTEGER_INDICES)
    keep_integer_indices(lambda: bool(_LISTENERS))
    keep_unread_lists(lambda: bool(_LISTENERS))
    keep_problem_types(lambda: bool(_LISTENERS))


def _runs_can_be_dropped() -> bool:
    """Whether a listener is set, and a run of a graph changes nothing by itself, as updates of parameters do."""
    if not _LISTENERS:
        return False
    options = getattr(_compiler_of(_CONVERTING[-1]), "options", None) if _CONVERTING else None
    return not getattr(options, "optimizer_in_graph", False)


def _is_no_event(record: logging.LogRecord) -> bool:
    """Keeps a log line unless it is one about an event that a listener receives."""
    if not _LISTENERS:
        return True
    # The advice at `item()` would be wrong here: a value that a step reads costs it one more graph.
    return not (is_recompile_limit(record) or suppressed_error(record) or is_scalar_advice(record))


def obstacle_of(error: BaseException) -> Obstacle:
    """The obstacle that Dynamo reports by an exception."""
    stack = _stack_of(getattr(error, "real_stack", None) or ())
    if isinstance(error, (Unsupported, UserError)):
        return _obstacle(str(getattr(error, "msg", error)), stack)
    kind, defect = type(error).__name__, place_in_package(error)
    return Obstacle(kind, first_line_of(error), (), str(error), stack, is_error=True, defect=defect)


def _obstacle(message: str, stack: Stack) -> Obstacle:
    """Of torch's message: a line with its kind, then lines that begin with `Explanation:`, `Hint:` and others.

    Some explanations are empty, and only the context names the operator.
    """
    lines = [line.strip() for line in message.partition(_NEXT_OBSTACLE)[0].splitlines()]
    lines = [line for line in lines if line] or [""]
    explanations = [*_after("Explanation:", lines), *_after("Developer debug context:", lines), lines[0]]
    return Obstacle(lines[0], next(filter(None, explanations), ""), tuple(_after("Hint:", lines)), message, stack)


def _after(label: str, lines: Iterable[str]) -> list[str]:
    return [line.removeprefix(label).strip() for line in lines if line.startswith(label)]


def _stack_of(frames: Iterable[Any]) -> Stack:
    return tuple((frame.filename, frame.lineno or 0) for frame in frames)


def _stack_in(text: str) -> Stack:
    """The stack that a text shows as a traceback does."""
    return tuple((match["file"], int(match["line"])) for match in _FRAME.finditer(text))


def _function(code: CodeType) -> Function:
    match = _RESUMED.fullmatch(code.co_name)
    if match is None:
        return Function(code.co_name, code.co_filename, code.co_firstlineno, continues=False)
    return Function(match["name"], code.co_filename, int(match["line"]), continues=True)
