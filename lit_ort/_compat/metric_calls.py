"""Makes Dynamo call metrics behind the graph where the step drops or only logs what they return.

Metrics of torchmetrics aren't traced, and by default a call of one ends the graph. A call such as
`self.accuracy.update(logits, labels)` only changes the metric, and nothing in a graph needs the result of
`self.log("accuracy", self.accuracy(logits, labels))`, so that such calls are made behind the graph, in the order of the
program, with detached arguments. If the program does anything else with a result, Dynamo traces it again and ends the
graph at the call.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch._dynamo import trace_rules
from torch._dynamo.exc import SpeculationRestartAnalysis, unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import TempLocalSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.utils import getfile
from torch._dynamo.variables import (
    SkipFunctionVariable,
    TensorVariable,
    UnspecializedNNModuleVariable,
    UserFunctionVariable,
    UserMethodVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch.fx.experimental.symbolic_shapes import DimDynamic

from lit_ort._compat.deferred_calls import READ_ATTRIBUTE, calls_of, defer_calls, owner_of_method, replace_method
from lit_ort._compat.patching import replaced, replaced_entry
from lit_ort._compat.value_checks import can_be_caught

# The methods of a metric that are called behind the graph.
_METHODS = frozenset({"update", "compute", "reset"})
# Of a metric: what a step reads that knows nothing of the metric's state.
_STATELESS = _METHODS | {"__call__", "forward", "training", "__class__"}
# Of Dynamo's `SpeculationLog`, which outlives a trace that is begun again: where results of metrics are read.
_READ = "_lit_ort_results_read"
# Of an output graph: a metric is traced.
_TRACED = "_lit_ort_metric_traced"
# The autocast around the trace.
_AUTOCAST = "_lit_ort_autocast"
# Of a function: it only keeps its arguments.
_TAKES_RESULTS = "_lit_ort_takes_results"


class _Argument(NamedTuple):
    """A tensor that a metric receives.

    Args:
        variable: the tensor.
        detached: its value at the call.
        version: counts the writes into it before the call; None if that is not known.
    """

    variable: Any
    detached: Any
    version: int | None


class MetricResult:
    """The type of a metric's result and of a collection of metrics, as far as a function that `takes_results` can tell
    while Dynamo traces it.
    """


class _Result(VariableTracker):
    """The result of a metric's call.

    Args:
        place: the call's instruction.
        log: Dynamo's `SpeculationLog`.
    """

    def __init__(self, place: tuple[Any, int], log: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._place, self._log = place, log
        self.logged = _LoggedResult(self)

    def python_type(self) -> type:
        return self.read()

    def as_proxy(self) -> Any:
        self.read()

    def var_getattr(self, tx: Any, name: str) -> Any:
        self.read()

    tp_getattro_impl = var_getattr

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        self.read()

    def reconstruct(self, codegen: Any) -> None:
        self.read()

    def read(self) -> NoReturn:
        """The program does more with a result than to log it.

        Raises:
            SpeculationRestartAnalysis: always.
        """
        _places_read(self._log).add(self._place)
        # The next trace can go into the metric, where this one went on behind it.
        self._log.clear()
        raise SpeculationRestartAnalysis(restart_reason="the result of a metric is read")


class _LoggedResult(VariableTracker):
    """A result as a function receives it that only keeps its arguments. Behind the metric's call, it has a source."""

    def __init__(self, result: _Result, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._result = result

    def python_type(self) -> type:
        return MetricResult

    def reconstruct(self, codegen: Any) -> None:
        self._result.read()


class _LoggedCollection(VariableTracker):
    """A collection of metrics as a function receives it that only keeps its arguments."""

    def python_type(self) -> type:
        return MetricResult


class _MetricCall(NamedTuple):
    """A call of a metric that is made behind the graph.

    Args:
        metric: the metric, or a function of torchmetrics.
        function: what is called.
        inputs: the arguments.
        names: of the last ones, which are keyword arguments.
        result: what the program gets.
    """

    metric: Any
    function: Any
    inputs: Sequence[Any]
    names: tuple[str, ...]
    result: _Result

    @property
    def arguments(self) -> Sequence[Any]:
        return [self.function, *map(_passed, self.inputs)]

    def write(self, cg: Any) -> None:
        cg.add_push_null(lambda: cg(self.function))
        for argument in self.arguments[1:]:
            cg(argument)
        cg.extend_output(cg.create_call_function_kw(len(self.inputs), self.names, False))
        cg.add_cache(self.result.logged)
        cg.clear_tos()
        self.result.logged.source = TempLocalSource(cg.tempvars[self.result.logged])


def keep_metric_calls(is_enabled: Callable[[], bool]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether calls are kept in the trace at hand.
    """
    defer_calls()
    replace_method(InstructionTranslatorBase, "call_function", functools.partial(_call_function, is_enabled))
    replace_method(UnspecializedNNModuleVariable, READ_ATTRIBUTE, _get_attribute)


def is_metric(value: Any) -> bool:
    """Whether a value is a metric of torchmetrics, or a collection of metrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    # isinstance of an abstract class asks all its subclasses, and keeps each class that it was asked about.
    return torchmetrics is not None and not {torchmetrics.Metric, torchmetrics.MetricCollection}.isdisjoint(
        type(value).__mro__
    )


def value_to_log(value: Any) -> Any:
    """What Lightning logs of a value in a step: of a metric that is called its value for the batch."""
    return value._forward_cache if is_metric(value) else value


def logged_items(values: Any) -> Iterable[tuple[str, Any]]:
    """What `log_dict` logs of a dictionary or of a collection of metrics, as Lightning's does."""
    if not _is_collection(values):
        return values.items()
    return values.items(keep_base=False, copy_state=not values._enable_compute_groups)


def is_of_metric(frame: Any) -> bool:
    """Whether a frame runs a function of torchmetrics, or a method of a metric of one's own."""
    code = frame.f_code
    if "/torchmetrics/" in code.co_filename:
        return True
    is_own = code.co_varnames[:1] == ("self",) and is_metric(frame.f_locals.get("self"))
    # The calls of all modules run the same functions of torch.
    return is_own and not trace_rules.check(code)


def takes_results(function: Callable[..., None]) -> Callable[..., None]:
    """Marks a function that only keeps its arguments: it may receive results that aren't known yet."""
    function.__dict__[_TAKES_RESULTS] = True
    return function


def _call_function(
    is_enabled: Callable[[], bool], original: Any, tx: Any, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    tx.output.__dict__.setdefault(_AUTOCAST, _autocast())
    result = _keep(tx, fn, [*args, *kwargs.values()], tuple(kwargs)) if is_enabled() else None
    if result is not None:
        tx.push(result)
        return
    if is_enabled() and _is_loss(tx, fn, [*args, *kwargs.values()]):
        with _traced_metrics(tx.output):
            original(tx, fn, args, kwargs)
        return
    if _takes_results(fn):
        args = [_kept_argument(argument) for argument in args]
        kwargs = {name: _kept_argument(argument) for name, argument in kwargs.items()}
    original(tx, fn, args, kwargs)


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _is_loss(tx: Any, fn: Any, args: Sequence[Any]) -> bool:
    """Whether a call of a metric can be traced as that of a loss: its arguments have gradients, or the metric is one's
    own, and it keeps numbers and tensors of fixed shapes.
    """
    metric = _value_of(fn)
    if not is_metric(metric) or (tx.f_code, tx.current_instruction.offset) not in _places_read(tx.speculation_log):
        return False
    torchmetrics: Any = sys.modules["torchmetrics"]
    data = torchmetrics.utilities.data
    kept = {data.dim_zero_sum, data.dim_zero_mean, data.dim_zero_max, data.dim_zero_min}
    if not isinstance(metric, torchmetrics.Metric) or metric.dist_sync_on_step or metric.compute_on_cpu:
        return False
    is_own = not type(metric).__module__.startswith("torchmetrics.")
    if not is_own and not any(type(argument) is TensorVariable and argument.requires_grad for argument in args):
        return False
    return all(reduction in kept for reduction in metric._reductions.values())


@contextmanager
def _traced_metrics(output: Any) -> Iterator[None]:
    """A context in which Dynamo traces functions of torchmetrics, and an update count is a number that can change."""
    look_up, wrap_integer = trace_rules.lookup_inner, VariableBuilder.wrap_symint

    def look_up_metric(obj: Any, name: Any = None, filename: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = look_up(obj, name, filename, *args, **kwargs)
        is_skipped = found is SkipFunctionVariable
        return UserFunctionVariable if is_skipped and "/torchmetrics/" in (filename or getfile(obj) or "") else found

    def wrap_count(self: Any, value: int, dynamism: Any = None, context: Any = None) -> Any:
        is_count = self.source.name.endswith("._update_count")
        return wrap_integer(self, value, DimDynamic.DYNAMIC if is_count else dynamism, context)

    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True), ExitStack() as stack:
        stack.enter_context(replaced(trace_rules, "lookup_inner", look_up_metric))
        stack.enter_context(replaced(VariableBuilder, "wrap_symint", wrap_count))
        stack.enter_context(replaced_entry(output.__dict__, _TRACED, True))
        yield


def _takes_results(fn: Any) -> bool:
    return _TAKES_RESULTS in getattr(getattr(_value_of(fn), "__func__", None), "__dict__", ())


def _value_of(variable: Any) -> Any:
    """The function, method or object that a variable is, without a guard on it; None for other variables."""
    if type(variable) is LazyVariableTracker:
        if not variable.is_realized():
            return variable.peek_value()
        variable = variable.realize()
    return variable.fn if type(variable) is UserFunctionVariable else getattr(variable, "value", None)


def _kept_argument(argument: Any) -> Any:
    """What a function that only keeps its arguments receives."""
    if isinstance(argument, _Result):
        return argument.logged
    if argument.source is None or not _is_collection(_value_of(argument)):
        return argument
    install_guard(argument.source.make_guard(GuardBuilder.TYPE_MATCH))
    return _LoggedCollection(source=argument.source)


def _is_collection(value: Any) -> bool:
    torchmetrics: Any = sys.modules.get("torchmetrics")
    return torchmetrics is not None and torchmetrics.MetricCollection in type(value).__mro__


def _places_read(log: Any) -> set[tuple[Any, int]]:
    return log.__dict__.setdefault(_READ, set())


def _keep(tx: Any, fn: Any, args: Sequence[Any], names: tuple[str, ...]) -> _Result | None:
    """Keeps the call of a metric for later, if that can be done; returns its result."""
    metric = None if _TRACED in tx.output.__dict__ else _metric_of(fn)
    place = tx.f_code, tx.current_instruction.offset
    if metric is None or place in _places_read(tx.speculation_log):
        return None
    # In the graphs of higher-order operators, such as checkpoints, Dynamo allows no side effects.
    if fn.source is None or can_be_caught(tx, ()) or tx.output.current_tracer.parent is not None or tx.output.export:
        return None
    # Behind the graph, a block of autocast has ended.
    if _autocast() != tx.output.__dict__[_AUTOCAST]:
        return None
    inputs = [_input(tx, argument) for argument in args]
    if not all(inputs):
        return None
    if is_metric(metric):
        install_guard(fn.source.make_guard(GuardBuilder.TYPE_MATCH))
    result = _Result(place, tx.speculation_log)
    calls_of(tx.output).append(_MetricCall(metric, fn, inputs, names, result))
    return result


def _metric_of(fn: Any) -> Any:
    """The metric that a call changes, or the function of torchmetrics that is called; otherwise None."""
    if isinstance(fn, UserMethodVariable):
        is_known = getattr(fn.get_function(), "__name__", "") in _METHODS
        value = getattr(owner_of_method(fn), "value", None) if is_known else None
        return value if is_metric(value) else None
    value = _value_of(fn)
    # A metric wraps its own update.
    method = getattr(value, "__wrapped__", None)
    if getattr(method, "__name__", None) in _METHODS:
        value = getattr(method, "__self__", None)
    is_function = isinstance(value, types.FunctionType) and str(value.__module__).startswith("torchmetrics.functional.")
    return value if is_function or is_metric(value) else None


def _input(tx: Any, variable: Any) -> _Argument | None:
    """What a metric receives for a variable, or None if it is neither a tensor nor a constant."""
    if type(variable) is LazyVariableTracker:
        if not variable.is_realized() and not isinstance(variable.peek_value(), torch.Tensor):
            return None
        variable = variable.realize()
    if type(variable) is TensorVariable:
        return _Argument(variable, variable.call_method(tx, "detach", [], {}), _version(variable))
    is_constant = variable.is_python_constant()
    # The program may still change lists, sets and dictionaries.
    if not is_constant or isinstance(variable.as_python_constant(), (list, set, dict, collections.deque)):
        return None
    return _Argument(variable, variable, None)


def _version(variable: Any) -> int | None:
    example = variable.as_proxy().node.meta["example_value"]
    return None if example.is_inference() else example._version


def _passed(argument: _Argument) -> Any:
    """The variable that a metric receives: what it was at the call."""
    variable, detached, version = argument
    if variable is detached:
        return variable
    if version is None or version != _version(variable):
        node = detached.as_proxy().node
        node.op, node.target = "call_function", torch.detach_copy
    elif variable.source is not None:
        return variable
    return detached


def _get_attribute(original: Any, variable: Any, tx: Any, name: str) -> Any:
    """Ends the graph where the program reads the state of a metric whose call is kept."""
    if name not in _STATELESS and any(
        isinstance(call, _MetricCall) and call.metric is variable.value for call in calls_of(tx.output)
    ):
        unimplemented(
            gb_type="State of a metric",
            context=name,
            explanation=f"The step reads {name} of {type(variable.value).__name__} after an update.",
            hints=["Read it at the end of the epoch."],
        )
    return original(variable, tx, name)
