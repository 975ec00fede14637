"""Makes a condition on a number that changes a constant where Dynamo needs one, as in `x.requires_grad_(step >= 100)`.

Dynamo alone fails with an error of its own. Here the graph is for the condition's value, as it is behind an `if`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables.tensor import SymNodeVariable

from lit_ort._compat.deferred_calls import replace_method


def keep_conditions(is_enabled: Callable[[], bool]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether conditions can be constants in the trace at hand.
    """
    replace_method(SymNodeVariable, "as_python_constant", functools.partial(_value, is_enabled))
    replace_method(SymNodeVariable, "is_python_constant", _is_constant)


def _value(is_enabled: Callable[[], bool], original: Any, variable: Any) -> Any:
    if isinstance(variable.sym_num, torch.SymBool) and is_enabled():
        return variable.evaluate_expr()
    return original(variable)


def _is_constant(_: Any, variable: Any) -> bool:
    # Where Dynamo asks first, a condition stays symbolic.
    return False
