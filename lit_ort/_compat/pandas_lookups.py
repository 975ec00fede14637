"""Makes Dynamo trace look-ups in an Index of pandas, such as `x[:, columns.get_loc("y")]`, without a graph break.

Dynamo traces nothing of pandas. An Index never changes, so that what its methods return for constants is a constant of
the trace, with a guard that a later Index has the same labels.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from torch._dynamo.guards import _get_closure_vars, install_guard
from torch._dynamo.variables import (
    ConstantVariable,
    ListVariable,
    NumpyVariable,
    UserDefinedObjectVariable,
    UserMethodVariable,
)
from torch._dynamo.variables.base import VariableTracker

from lit_ort._compat.deferred_calls import owner_of_method, replace_method

_METHODS = frozenset(
    {"__contains__", "__getitem__", "__iter__", "__len__", "copy", "get_indexer", "get_loc", "to_list", "tolist"}
)
_CONSTANTS = (bool, int, float, str, type(None))


def keep_lookups(is_enabled: Callable[[], bool]) -> None:
    """Puts the hook into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether results are constants in the trace at hand.
    """
    replace_method(UserMethodVariable, "call_function", functools.partial(_call, is_enabled))


def _call(is_enabled: Callable[[], bool], original: Any, method: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    result = _result(method, tx, args) if is_enabled() and not kwargs else None
    return original(method, tx, args, kwargs) if result is None else result


def _result(method: Any, tx: Any, args: Any) -> Any:
    """What a method returns, as a variable; None if it is no look-up of constants."""
    owner, name = owner_of_method(method), method.get_function().__name__
    if type(owner) is not UserDefinedObjectVariable or owner.source is None or not _is_index(owner.value):
        return None
    if name not in _METHODS or not all(argument.is_python_constant() for argument in args):
        return None
    index: Any = owner.value
    if name == "copy" and args:
        return None
    try:
        value = getattr(index, name)(*[argument.as_python_constant() for argument in args])
    except (LookupError, TypeError, ValueError):
        # As in eager, which raises it in the step.
        return None
    variable = owner if name == "copy" else _variable(tx, value if name != "__iter__" else list(index))
    if variable is None:
        return None
    install_guard(owner.source.make_guard(functools.partial(_add_guard, index)))
    return variable.call_method(tx, "__iter__", [], {}) if name == "__iter__" else variable


def _is_index(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Index)


def _variable(tx: Any, value: Any) -> Any:
    """A number, text, list or array as a variable; None for anything else."""
    if type(value) in _CONSTANTS:
        return ConstantVariable.create(value)
    if type(value) is list and all(type(item) in _CONSTANTS for item in value):
        return VariableTracker.build(tx, value)
    if type(value) is np.ndarray and value.dtype == np.int64:
        items = ListVariable([ConstantVariable.create(item) for item in value.tolist()])
        return NumpyVariable(np.array).call_function(tx, [items], {"dtype": ConstantVariable.create("int64")})
    return None


def _add_guard(index: Any, builder: Any, guard: Any) -> None:
    def has_same_labels(other: Any) -> bool:
        return other is index or (type(other) is type(index) and other.identical(index))

    name = f"___lit_ort_labels_{id(has_same_labels)}"
    source = guard.originating_source.name
    variables = {**_get_closure_vars(), name: has_same_labels}
    builder.add_python_lambda_leaf_guard_to_root([f"{name}({source})"], [f"the labels of {source}"], variables)
