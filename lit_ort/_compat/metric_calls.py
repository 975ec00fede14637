"""Makes Dynamo call metrics behind the graph where the step drops what they return.

Metrics of torchmetrics aren't traced, and by default a call of one ends the graph. A call such as
`self.accuracy(logits, labels)` or `self.accuracy.update(logits, labels)` only changes the metric, so that it is made
behind the graph, in the order of the program, with detached arguments.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo import trace_rules
from torch._dynamo.bytecode_transformation import create_instruction
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import (
    TensorVariable,
    UnspecializedNNModuleVariable,
    UserFunctionVariable,
    UserMethodVariable,
)
from torch._dynamo.variables.lazy import LazyVariableTracker

from lit_ort._compat.deferred_calls import calls_of, defer_calls, replace_method
from lit_ort._compat.value_checks import can_be_caught

# Of a metric: what a step reads that knows nothing of the metric's state.
_STATELESS = frozenset({"__call__", "forward", "update", "training", "__class__"})


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


class _MetricCall(NamedTuple):
    """A call of a metric that is made behind the graph."""

    metric: Any
    function: Any
    inputs: Sequence[Any]
    names: tuple[str, ...]

    @property
    def arguments(self) -> Sequence[Any]:
        return [self.function, *map(_passed, self.inputs)]

    def write(self, cg: Any) -> None:
        cg.add_push_null(lambda: cg(self.function))
        for argument in self.arguments[1:]:
            cg(argument)
        cg.extend_output(cg.create_call_function_kw(len(self.inputs), self.names, False))
        cg.append_output(create_instruction("POP_TOP"))


def keep_metric_calls(is_enabled: Callable[[], bool]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether calls are kept in the trace at hand.
    """
    defer_calls()
    replace_method(InstructionTranslatorBase, "call_function", functools.partial(_call_function, is_enabled))
    replace_method(UnspecializedNNModuleVariable, "var_getattr", _get_attribute)


def is_metric(value: Any) -> bool:
    """Whether a value is a metric of torchmetrics, or a collection of metrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection))


def is_of_metric(frame: Any) -> bool:
    """Whether a frame runs a function of torchmetrics, or a method of a metric of one's own."""
    code = frame.f_code
    if "/torchmetrics/" in code.co_filename:
        return True
    is_own = code.co_varnames[:1] == ("self",) and is_metric(frame.f_locals.get("self"))
    # The calls of all modules run the same functions of torch.
    return is_own and not trace_rules.check(code)


def _call_function(
    is_enabled: Callable[[], bool], original: Any, tx: Any, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    if is_enabled() and _keep(tx, fn, [*args, *kwargs.values()], tuple(kwargs)):
        # The program drops it.
        tx.push(fn)
    else:
        original(tx, fn, args, kwargs)


def _keep(tx: Any, fn: Any, args: Sequence[Any], names: tuple[str, ...]) -> bool:
    """Keeps the call of a metric for later if the program drops its result; returns whether it does."""
    following = tx.instructions[tx.instruction_pointer or 0]
    metric = _metric_of(fn) if following.opname == "POP_TOP" else None
    if metric is None:
        return False
    # In the graphs of higher-order operators, such as checkpoints, Dynamo allows no side effects.
    if fn.source is None or can_be_caught(tx, ()) or tx.output.current_tracer.parent is not None or tx.output.export:
        return False
    inputs = [_input(tx, argument) for argument in args]
    if not all(inputs):
        return False
    install_guard(fn.source.make_guard(GuardBuilder.TYPE_MATCH))
    calls_of(tx.output).append(_MetricCall(metric, fn, inputs, names))
    return True


def _metric_of(fn: Any) -> Any:
    """The metric that a call changes, or None."""
    if type(fn) is LazyVariableTracker and not fn.is_realized():
        value = fn.peek_value()
    elif isinstance(fn, UserMethodVariable):
        value = getattr(fn.obj, "value", None) if getattr(fn.fn, "__name__", "") == "update" else None
    elif isinstance(fn, UserFunctionVariable):
        value = fn.fn
    else:
        value = getattr(fn, "value", None)
    # A metric wraps its own update.
    method = getattr(value, "__wrapped__", None)
    if getattr(method, "__name__", None) == "update":
        value = getattr(method, "__self__", None)
    return value if is_metric(value) else None


def _input(tx: Any, variable: Any) -> _Argument | None:
    """What a metric receives for a variable, or None if it is neither a tensor nor a constant."""
    if type(variable) is LazyVariableTracker:
        if not variable.is_realized() and not isinstance(variable.peek_value(), torch.Tensor):
            return None
        variable = variable.realize()
    if type(variable) is TensorVariable:
        return _Argument(variable, variable.call_method(tx, "detach", [], {}), _version(variable))
    return _Argument(variable, variable, None) if variable.is_python_constant() else None


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
