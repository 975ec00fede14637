"""Makes Dynamo draw from a module's own `random.Random` at each call, as eager does.

Dynamo alone keeps the state of such an object from the trace, so that each call draws the same numbers.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import RandomVariable
from torch._dynamo.variables.user_defined import call_random_fn

from lit_ort._compat.deferred_calls import replace_method

# The attribute of a variable: the program's object.
_OBJECT = "_lit_ort_object"
_DRAWS = frozenset({"random", "randint", "randrange", "uniform"})
_OF_STATE = frozenset({"getstate", "setstate", "seed"})


def keep_draws(is_enabled: Callable[[], bool]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether the trace at hand draws from such objects at each call.
    """
    replace_method(VariableBuilder, "_wrap", functools.partial(_wrap, is_enabled))
    replace_method(RandomVariable, "call_method", _call)


def _wrap(is_enabled: Callable[[], bool], original: Any, builder: Any, value: Any) -> Any:
    variable = original(builder, value)
    if type(value) is random.Random and isinstance(variable, RandomVariable) and is_enabled():
        builder.install_guards(GuardBuilder.ID_MATCH)
        setattr(variable, _OBJECT, value)
    return variable


def _call(original: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    generator = getattr(variable, _OBJECT, None)
    if generator is not None and name in _DRAWS:
        return call_random_fn(tx, _draw(variable.random, generator, name), args, kwargs)
    if generator is not None and name in _OF_STATE:
        unimplemented(
            gb_type="The state of a random.Random",
            context=name,
            explanation="The state of a `random.Random` is that of the trace in a graph.",
            hints=["Read and set it in a hook, such as `on_train_batch_start`."],
        )
    return original(variable, tx, name, args, kwargs)


def _draw(copy: random.Random, generator: random.Random, name: str) -> Callable[..., Any]:
    """Draws from the copy while tracing, that is at the first call, and from then on from the program's object."""
    methods = [getattr(copy, name)]

    def draw(*args: Any, **kwargs: Any) -> Any:
        method = methods.pop() if methods else getattr(generator, name)
        return method(*args, **kwargs)

    return draw
