"""Makes Dynamo guard a bound method of a container, such as `steps.append`, by its object and its name.

In `self.steps.append(len(self.others))`, a graph that ends at `len` leaves the method for what follows. Dynamo guards
it by its identity, but Python makes another one for each call, and what follows would be compiled at each.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, bound_builtin_method_descriptor
from torch._dynamo.variables.functions import BoundBuiltinMethodVariable

from lit_ort._compat.deferred_calls import CONTAINERS, replace_method


def keep_bound_methods(is_enabled: Callable[[], bool]) -> None:
    """Puts the hook into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether the trace at hand has such guards.
    """
    replace_method(VariableBuilder, "_wrap", functools.partial(_wrap, is_enabled))


def _wrap(is_enabled: Callable[[], bool], original: Any, builder: Any, value: Any) -> Any:
    if not is_enabled() or type(value) is not types.BuiltinMethodType or type(value.__self__) not in CONTAINERS:
        return original(builder, value)
    descriptor = bound_builtin_method_descriptor(value)
    if descriptor is None or builder.source is None:
        return original(builder, value)
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    install_guard(AttrSource(builder.source, "__name__").make_guard(GuardBuilder.EQUALS_MATCH))
    owner = VariableTracker.build(builder.tx, value.__self__, AttrSource(builder.source, "__self__"))
    return BoundBuiltinMethodVariable(descriptor, owner, source=builder.source)
