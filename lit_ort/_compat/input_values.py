"""Makes Dynamo trace branches on values of a step's inputs, such as `if lengths.min() == 0`, without a graph break.

The branch is taken as the values at hand decide, and a guard computes the condition again before each later call. Like
eager, that computes it once a call. Integers that are read from inputs, as by `int(lengths.max())`, are constants with
such a guard. A condition or integer that depends on weights, or on more than inputs, still ends the graph.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch._dynamo.guards import _get_closure_vars, install_guard
from torch._dynamo.variables import ConstantVariable, TensorVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._guards import CompileContext

from lit_ort._compat.deferred_calls import JUMPS, replace_instructions, replace_method, tensor_method
from lit_ort._compat.input_functions import InputFunction, function_of_inputs

# Functions whose arguments are sizes and other integers.
_OF_INTEGERS = frozenset({torch.arange, torch.zeros, torch.ones, torch.empty, torch.eye, torch.rand, torch.randn})
# Of one condition or integer in the traces of one function. With more, the graph ends there.
_MOST_VALUES, _MOST_TRACES = 2, 4


# By the code and the position of an instruction: the values of the traces, by the number of the trace.
_Seen = dict[tuple[CodeType, int], dict[Any, bool | int]]


def keep_input_values(is_enabled: Callable[[], bool]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether values are constants in the trace at hand.
    """
    seen: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()
    replace_instructions(JUMPS, functools.partial(_jump, is_enabled, seen))
    replace_method(*tensor_method("item"), functools.partial(_item, is_enabled, seen))
    replace_method(TorchInGraphFunctionVariable, "call_function", functools.partial(_call, is_enabled, seen))


def _jump(is_enabled: Callable[[], bool], seen: Any, original: Callable[..., None], tx: Any, inst: Any) -> None:
    variable = _tensor(tx.stack[-1]) if is_enabled() else None
    if variable is not None:
        value = _value(seen, tx, variable, bool)
        if value is not None:
            tx.pop()
            tx.push(value)
    original(tx, inst)


def _item(
    is_enabled: Callable[[], bool], seen: Any, original: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any
) -> Any:
    value = _integer(seen, tx, variable) if is_enabled() and not args and not kwargs else None
    return original(variable, tx, *args, **kwargs) if value is None else value


def _call(
    is_enabled: Callable[[], bool], seen: Any, original: Any, variable: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Passes tensors that are sizes as integers, as eager converts them."""
    if variable.value in _OF_INTEGERS and is_enabled():
        args = [_integer(seen, tx, argument) or argument for argument in args]
    return original(variable, tx, args, kwargs)


def _integer(seen: Any, tx: Any, variable: Any) -> Any:
    """An integer or boolean as a constant of the trace; None if a variable is none, or can't be a constant."""
    variable = _tensor(variable)
    if variable is None:
        return None
    example = variable.as_proxy().node.meta["example_value"]
    if example.dtype.is_floating_point or example.dtype.is_complex or example.dim():
        return None
    return _value(seen, tx, variable, bool if example.dtype == torch.bool else int)


def _tensor(variable: Any) -> Any:
    """A variable if it is a tensor's, otherwise None."""
    # Not isinstance, which reads inputs that may not be needed.
    if type(variable) is LazyVariableTracker and (variable.is_realized() or variable.peek_type() is torch.Tensor):
        variable = variable.realize()
    return variable if type(variable) is TensorVariable else None


def _value(seen: Any, tx: Any, variable: Any, kind: Callable[[Any], bool | int]) -> Any:
    """A value as a constant of the trace, with its guard; None if it can't be one."""
    reading = function_of_inputs(tx, variable.as_proxy().node, kind)
    if reading is None or not reading.sources or not _is_steady(seen.setdefault(_owner(tx), {}), tx, reading.value):
        return None
    install_guard(reading.sources[0].make_guard(functools.partial(_add_guard, reading)))
    return ConstantVariable.create(reading.value)


def _owner(tx: Any) -> Any:
    """The module whose step is traced, or the code of a function."""
    module = tx.output.root_tx.f_locals.get("self")
    return module if isinstance(module, torch.nn.Module) else tx.output.root_tx.f_code


def _is_steady(seen: _Seen, tx: Any, value: bool | int) -> bool:
    """Whether few traces have seen few values, this one included."""
    values = seen.setdefault((tx.f_code, tx.current_instruction.offset or 0), {})
    candidate = {**values, str(CompileContext.current_compile_id()): value}
    few = len(set(candidate.values())) <= _MOST_VALUES
    if not few or (len(candidate) > _MOST_TRACES and len(set(candidate.values())) > 1):
        return False
    values.update(candidate)
    return True


def _add_guard(reading: InputFunction, builder: Any, guard: Any) -> None:
    name = f"___lit_ort_value_{id(reading.compute)}"
    code = f"{name}({', '.join(source.name for source in reading.sources)}) == {reading.value}"
    names = " and ".join(source.name for source in reading.sources)
    shown = f"a number that the step computes from {names} was {reading.value}"
    variables = {**_get_closure_vars(), name: reading.compute}
    builder.add_python_lambda_leaf_guard_to_root([code], [shown], closure_vars=variables)
