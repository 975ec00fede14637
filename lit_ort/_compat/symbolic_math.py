"""Makes Dynamo compute functions of numbers that change in the graph, such as `math.exp(-step / 100)` and `np.cos(x)`.

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

from lit_ort._compat.deferred_calls import replace_method
from lit_ort._compat.numpy_scalars import OF_DTYPE

# Functions of symbolic numbers that torch has.
_TORCHS = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
# Those that torch's expressions have, but not its symbolic numbers.
_MISSING = ("exp", "log")
# NumPy's names of these.
_OF_NUMPY: Mapping[str, str] = MappingProxyType({"asin": "arcsin", "acos": "arccos", "atan": "arctan"})
# Operators on a number of NumPy whose result is one.
_OPERATORS = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, operator.pos, operator.mod}
    | {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}
)


class _NumPyFloat(SymNodeVariable):
    """A symbolic number that is a `np.float64` in eager, of which tensors are float64."""


def exp(value: float | torch.SymInt | torch.SymFloat) -> Any:
    """`math.exp` of a number or a symbolic one."""
    return _computed("exp", value)


def log(value: float | torch.SymInt | torch.SymFloat) -> Any:
    """`math.log` of a number or a symbolic one."""
    return _computed("log", value)


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
    known: dict[Any, Callable[[Any], Any]] = {}
    for name in (*_TORCHS, *_MISSING):
        function = {"exp": exp, "log": log}.get(name) or getattr(torch, f"_sym_{name}")
        known[getattr(math, name)] = known[getattr(np, _OF_NUMPY.get(name, name))] = function
    for name in _MISSING:
        setattr(PythonPrinter, f"_print_OpaqueUnaryFn_{name}", _printer(name))

    def call(original: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if is_enabled() and not kwargs and len(args) == 1 and variable.value.__hash__ and variable.value in known:
            argument = args[0].realize() if hasattr(args[0], "realize") else args[0]
            if isinstance(argument, SymNodeVariable):
                proxy = tx.output.create_proxy("call_function", known[variable.value], (argument.as_proxy(),), {})
                made = SymNodeVariable.create(tx, proxy)
                return _numpys(made) if isinstance(variable, NumpyVariable) else made
        if isinstance(variable, TorchInGraphFunctionVariable) and variable.value in OF_DTYPE and "dtype" not in kwargs:
            data = args[0] if args else kwargs.get("data")
            if isinstance(data, _NumPyFloat):
                kwargs = {**kwargs, "dtype": ConstantVariable.create(torch.float64)}
        return original(variable, tx, args, kwargs)

    for kind in (NumpyVariable, TorchInGraphFunctionVariable):
        replace_method(kind, "call_function", call)
    replace_method(BuiltinVariable, "call_function", _call_builtin)


def _call_builtin(original: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    made = original(variable, tx, args, kwargs)
    if any(isinstance(argument, _NumPyFloat) for argument in args):
        if variable.fn in _OPERATORS and type(made) is SymNodeVariable:
            return _numpys(made)
        if variable.fn is float and isinstance(made, _NumPyFloat):
            return SymNodeVariable(made.proxy, made.sym_num)
    return made


def _numpys(made: Any) -> _NumPyFloat:
    return _NumPyFloat(made.proxy, made.sym_num)


def _printer(name: str) -> Callable[[Any, Any], str]:
    def printed(printer: Any, expression: Any) -> str:
        return f"math.{name}({printer._print(expression.args[0])})"

    return printed
