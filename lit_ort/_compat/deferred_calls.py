"""Calls that Dynamo's code makes behind a graph, in the order of the program and before it assigns attributes."""

from __future__ import annotations

import collections
import dis
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import TensorVariable, TupleVariable, VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker

_ATTRIBUTE = "_lit_ort_calls"
# What a variable does when the program reads one of its attributes; since torch 2.14, under CPython's name.
READ_ATTRIBUTE = "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"
# Where the variable of a method has the object; since torch 2.15, under CPython's name.
_OWNERS = ("im_self", "obj")
# Instructions that branch on a value.
JUMPS = tuple(name for name in dis.opmap if name.startswith("POP_JUMP_") and name.endswith(("IF_TRUE", "IF_FALSE")))
# The types of which Dynamo guards the contents if the program reads them.
CONTAINERS = frozenset(
    {
        list,
        tuple,
        set,
        dict,
        str,
        collections.deque,
        collections.OrderedDict,
        collections.defaultdict,
        collections.Counter,
    }
)


class DeferredCall(Protocol):
    """A call that is made behind the graph."""

    @property
    def arguments(self) -> Sequence[Any]:
        """The variables that it needs."""
        ...

    def write(self, cg: Any) -> None:
        """Writes its bytecode, which leaves the stack as it was. It is written twice, and the first is dropped."""
        ...


def calls_of(output: Any) -> list[Any]:
    """The calls of a trace, in order.

    Args:
        output: Dynamo's `OutputGraph`.
    """
    return output.__dict__.setdefault(_ATTRIBUTE, [])


@functools.cache
def defer_calls() -> None:
    """Puts the hooks into Dynamo, for the rest of the process."""
    replace_method(SideEffects, "is_empty", _is_empty)
    replace_method(SideEffects, "prune_dead_object_new", _prune)
    replace_method(SideEffects, "codegen_update_mutated", _write_code)


def replace_method(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replaces a method; the function is called with the original one first."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    setattr(owner, name, method)


def tensor_method(name: str) -> tuple[Any, str]:
    """Where Dynamo has what it does at a method of a tensor: an object and its attribute. Since torch 2.14, a table."""
    table = getattr(TensorVariable, "tp_methods", None)
    return (TensorVariable, f"method_{name}") if table is None else (table[name], "handler")


def realized(variable: Any) -> Any:
    """A variable that Dynamo may not have looked at yet, with its guards."""
    return variable.realize() if isinstance(variable, LazyVariableTracker) else variable


def owner_of_method(method: Any) -> Any:
    """The variable of the object that a method is bound to."""
    return next(getattr(method, name) for name in _OWNERS if hasattr(method, name))


def replace_instructions(names: Iterable[str], function: Callable[..., Any]) -> None:
    """Replaces what Dynamo does at instructions; the function is called with the original one first."""
    codes = [dis.opmap[name] for name in names]
    for translator in _with_subclasses(InstructionTranslatorBase):
        for code in codes:
            translator.dispatch_table[code] = functools.partial(function, translator.dispatch_table[code])


def _with_subclasses(cls: Any) -> Iterable[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def is_unread(tx: Any, variable: Any) -> bool:
    """Whether a variable is a container that nothing in the trace has read."""
    is_lazy = type(variable) is LazyVariableTracker and not variable.is_realized()
    return is_lazy and variable.peek_type() in CONTAINERS and variable.peek_value() not in tx.output.side_effects


def _calls_in(side_effects: Any) -> Sequence[DeferredCall]:
    output = side_effects.output_graph_weakref()
    return () if output is None else calls_of(output)


def _is_empty(original: Any, side_effects: Any) -> bool:
    return original(side_effects) and not _calls_in(side_effects)


def _prune(original: Any, side_effects: Any, tx: Any) -> None:
    """Keeps the objects that the calls need, as those on the stack."""
    arguments = [argument for call in _calls_in(side_effects) for argument in call.arguments]
    needed = TupleVariable([argument for argument in arguments if not is_unread(tx, argument)])
    LazyVariableTracker.realize_all(needed, allow_lazy_constant=True)
    tx.stack.append(needed)
    original(side_effects, tx)
    tx.stack.pop()


def _write_code(original: Any, side_effects: Any, cg: Any, *args: Any, **kwargs: Any) -> None:
    """Makes the calls before attributes are assigned, which can replace a container or a value that is written."""
    for call in _calls_in(side_effects):
        call.write(cg)
    original(side_effects, cg, *args, **kwargs)
