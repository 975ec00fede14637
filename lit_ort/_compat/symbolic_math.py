"""Makes Dynamo compute functions of numbers that change as expressions: `math.exp(-step / 100)` and `np.clip(n, 0, 8)`.

Torch has this for some functions of `math`, such as `math.cos`; a graph with others, or with those of NumPy, is for one
value of their argument. Here all of them are expressions of symbolic numbers, which are computed at each call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, NumpyVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy import functions
from torch.utils._sympy.printers import PythonPrinter

from lit_ort._compat.deferred_calls import realized, replace_method
from lit_ort._compat.numpy_scalars import OF_DTYPE

# Functions of symbolic numbers that torch has.
_TORCHS = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
# Those that torch's expressions have, but not its symbolic numbers.
_MISSING = ("exp", "log")
# NumPy's names of these.
_OF_NUMPY: Mapping[str, str] = MappingProxyType({"asin": "arcsin", "acos": "arccos", "atan": "arctan"})
# Operators on a number of NumPy whose result is one.
_OPERATORS = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.pow, operator.mod}
    | {operator.neg, operator.pos, operator.abs}
    | {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}
)


class _NumPyNumber(SymNodeVariable):
    """A symbolic number that is a `np.float64` or `np.int64` in eager. Tensors of the former are float64."""


def exp(value: float | torch.SymInt | torch.SymFloat) -> Any:
    """`math.exp` of a number or a symbolic one."""
    return _computed("exp", value)


def log(value: float | torch.SymInt | torch.SymFloat) -> Any:
    """`math.log` of a number or a symbolic one."""
    return _computed("log", value)


def maximum(value: Any, other: Any) -> Any:
    """`np.maximum` of numbers or symbolic ones."""
    return _of_two(torch.sym_max, np.maximum, value, other)


def minimum(value: Any, other: Any) -> Any:
    """`np.minimum` of numbers or symbolic ones."""
    return _of_two(torch.sym_min, np.minimum, value, other)


def clip(value: Any, low: Any, high: Any) -> Any:
    """`np.clip` of numbers or symbolic ones."""
    return minimum(maximum(value, low), high)


def _of_two(symbolic: Callable[[Any, Any], Any], concrete: Callable[[Any, Any], Any], value: Any, other: Any) -> Any:
    if not any(isinstance(number, torch.SymInt | torch.SymFloat) for number in (value, other)):
        return concrete(value, other).item()
    if any(isinstance(number, float | torch.SymFloat) for number in (value, other)):
        value, other = torch.sym_float(value), torch.sym_float(other)
    return symbolic(value, other)


def _computed(name: str, value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        value = torch.sym_float(value)
    function: Callable[[float], float] = getattr(math, name)
    if not isinstance(value, torch.SymFloat):
        return function(value)
    node = value.node
    expression = getattr(functions, f"OpaqueUnaryFn_{name}")(node.expr)
    return torch.SymFloat(SymNode(expression, node.shape_env, float, function(node.hint)))


def keep_functions(is_enabled: Callable[[], bool]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether functions of numbers are expressions in the trace at hand.
    """
    known: dict[Any, Callable[..., Any]] = {np.clip: clip, np.minimum: minimum, np.maximum: maximum}
    known |= {np.int64: torch.sym_int, np.float64: torch.sym_float}
    for name in (*_TORCHS, *_MISSING):
        function = {"exp": exp, "log": log}.get(name) or getattr(torch, f"_sym_{name}")
        known[getattr(math, name)] = known[getattr(np, _OF_NUMPY.get(name, name))] = function
    for name in _MISSING:
        setattr(PythonPrinter, f"_print_OpaqueUnaryFn_{name}", _printer(name))

    def call(original: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if is_enabled() and not kwargs and variable.value.__hash__ and variable.value in known:
            arguments = list(map(realized, args))
            if all(map(_is_number, arguments)) and any(isinstance(argument, SymNodeVariable) for argument in arguments):
                proxies = tuple(argument.as_proxy() for argument in arguments)
                proxy = tx.output.create_proxy("call_function", known[variable.value], proxies, {})
                made = SymNodeVariable.create(tx, proxy)
                return _numpys(made) if isinstance(variable, NumpyVariable) else made
        if isinstance(variable, TorchInGraphFunctionVariable) and variable.value in OF_DTYPE and "dtype" not in kwargs:
            data = args[0] if args else kwargs.get("data")
            if isinstance(data, _NumPyNumber) and isinstance(data.sym_num, torch.SymFloat):
                kwargs = {**kwargs, "dtype": ConstantVariable.create(torch.float64)}
        return original(variable, tx, args, kwargs)

    for kind in (NumpyVariable, TorchInGraphFunctionVariable):
        replace_method(kind, "call_function", call)
    replace_method(BuiltinVariable, "call_function", _call_builtin)


def _is_number(argument: Any) -> bool:
    """Whether an argument is a symbolic number, or a constant int or float."""
    if isinstance(argument, SymNodeVariable):
        return not isinstance(argument.sym_num, torch.SymBool)
    return isinstance(argument, ConstantVariable) and type(argument.as_proxy()) in (int, float)


def _call_builtin(original: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    made = original(variable, tx, args, kwargs)
    if any(isinstance(argument, _NumPyNumber) or _is_numpys(argument) for argument in args):
        if variable.fn in _OPERATORS and type(made) is SymNodeVariable:
            return _numpys(made)
        if variable.fn in (float, int) and isinstance(made, _NumPyNumber):
            return SymNodeVariable(made.proxy, made.sym_num)
    return made


def _is_numpys(argument: Any) -> bool:
    return isinstance(argument, ConstantVariable) and isinstance(argument.value, np.generic)


def _numpys(made: Any) -> _NumPyNumber:
    return _NumPyNumber(made.proxy, made.sym_num)


def _printer(name: str) -> Callable[[Any, Any], str]:
    def printed(printer: Any, expression: Any) -> str:
        return f"math.{name}({printer._print(expression.args[0])})"

    return printed
