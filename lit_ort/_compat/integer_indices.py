"""Makes Dynamo keep an int symbolic that is one of several indices, such as `x[:, n]` and `x[:, n] = 0`.

Torch converts such an index to a constant, and each of its values needs a graph. Here it is an argument of `select`,
which is the same view.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import EllipsisType, MappingProxyType, NoneType
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from lit_ort._compat.deferred_calls import realized, replace_method
from lit_ort._compat.selections import Select, call, node_of


def keep_integer_indices(is_enabled: Callable[[], bool]) -> None:
    """Puts the hook for assignments into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether such indices stay symbolic in the trace at hand.
    """

    def assign(original: Any, variable: Any, tx: Any, key: Any, value: Any) -> Any:
        parts = key.items if is_enabled() and isinstance(key, TupleVariable) else ()
        if any(isinstance(realized(part), SymNodeVariable) for part in parts):
            view = BuiltinVariable(operator.getitem).call_function(tx, [variable, key], {})
            if isinstance(view, TensorVariable):
                variable, key = view, ConstantVariable.create(...)
        return original(variable, tx, key, value)

    replace_method(TensorVariable, "method___setitem__", assign)


def select_by_integers(tx: Any, node: fx.Node) -> Any:
    """The result of a `getitem` as a variable; None without a symbolic int among its indices, or with a tensor."""
    value: Any
    index: Any
    value, index = node.args
    if not isinstance(index, tuple) or not any(map(_is_symbolic, index)) or not all(map(_is_basic, index)):
        return None
    rest = value.meta["example_value"].dim() - sum(part is not None and part is not ... for part in index)
    dimension, selected = 0, []
    for part in index:
        if _is_symbolic(part):
            selected.append((dimension, part))
        dimension += rest if part is ... else not isinstance(part, int)
    made = call(tx, operator.getitem, value, tuple(slice(None) if _is_symbolic(part) else part for part in index))
    for dimension, part in reversed(selected):
        made = call(tx, "select", node_of(made), dimension, part)
    return made


def _is_symbolic(part: Any) -> bool:
    return isinstance(part, fx.Node) and isinstance(part.meta.get("example_value"), torch.SymInt)


def _is_basic(part: Any) -> bool:
    is_constant = isinstance(part, int | slice | NoneType | EllipsisType) and not isinstance(part, bool)
    return is_constant or _is_symbolic(part)


# By what a node calls.
INTEGER_INDICES: Mapping[Any, Select] = MappingProxyType({operator.getitem: select_by_integers})
