"""Makes Dynamo trace a write into a container without reading the container.

By default Dynamo traces `self.outputs.append(x)` by reading the list and writing it anew, so that a step whose list
grows is compiled for every length. Here such a write is kept as a call that is made behind the graph, in the order of
the program, and the container is read, with guards on its contents, only if the same trace needs these. A number that
is counted is symbolic from the first trace on.
"""

from __future__ import annotations

import collections
import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch._dynamo.bytecode_transformation import create_call_method, create_instruction
from torch._dynamo.guards import GuardBuilder, install_guard, make_dupe_guard
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    ConstDictVariable,
    DeletedVariable,
    TupleVariable,
)
from torch._dynamo.variables import builtin as builtins_of_dynamo
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lazy import LazyConstantVariable, LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch.fx.experimental.symbolic_shapes import DimDynamic

from lit_ort._compat.deferred_calls import calls_of, defer_calls, replace_method

# `update` of a counter adds.
_OF_DICTIONARIES = frozenset({"__setitem__", "setdefault", "update", "clear"})
# By the exact type of a container: its methods that write, return None and need not know the contents; and the one
# that an operator such as `+=` stands for.
_METHODS: Mapping[type, frozenset[str]] = MappingProxyType(
    {
        list: frozenset({"append", "extend", "insert", "clear"}),
        collections.deque: frozenset({"append", "appendleft", "extend", "extendleft", "clear"}),
        set: frozenset({"add", "update", "discard", "clear"}),
        dict: _OF_DICTIONARIES,
        collections.OrderedDict: _OF_DICTIONARIES,
        collections.defaultdict: _OF_DICTIONARIES,
        collections.Counter: _OF_DICTIONARIES - {"update"},
    }
)
_IN_PLACE: Mapping[tuple[Any, type], str] = MappingProxyType(
    {
        (operator.iadd, list): "extend",
        (operator.iadd, collections.deque): "extend",
        (operator.ior, set): "update",
        (operator.ior, dict): "update",
    }
)
# Methods of dictionaries of which this is true if the program drops their result.
_WITHOUT_RESULT = frozenset({"setdefault"})
# Methods whose argument is itself a container, which the program can change before the call is made.
_BY_CONTENTS = frozenset({"extend", "extendleft", "update"})


class _Write(NamedTuple):
    """A call of a container's method that is made behind the graph."""

    container: Any
    source: Any
    method: str
    arguments: Sequence[Any]

    def write(self, cg: Any) -> None:
        cg(self.source)
        cg.load_method(self.method)
        for argument in self.arguments:
            cg(argument)
        cg.extend_output([*create_call_method(len(self.arguments)), create_instruction("POP_TOP")])


class _Method(GetAttrVariable):
    """A method of a container. A graph break between the method and its call, as in `append(loss.item())`, leaves the
    container unread.
    """

    _nonvar_fields = {"obj", *GetAttrVariable._nonvar_fields}

    def as_python_constant(self) -> Any:
        raise NotImplementedError


def keep_writes(is_enabled: Callable[[], bool]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether writes are kept in the trace at hand.
    """
    replace_method(InstructionTranslatorBase, "_load_attr", functools.partial(_load_attr, is_enabled))
    replace_method(LazyVariableTracker, "call_method", functools.partial(_call_method, is_enabled))
    replace_method(LazyVariableTracker, "lazy_isinstance", _is_instance)
    replace_method(BuiltinVariable, "call_function", functools.partial(_call_builtin, is_enabled))
    # Since torch 2.13 a class of its own.
    owner = getattr(builtins_of_dynamo, "SetAttrBuiltinVariable", BuiltinVariable)
    replace_method(owner, "call_function", functools.partial(_set_attribute, is_enabled))
    replace_method(VariableBuilder, "_wrap", _wrap)
    defer_calls()


def _writes_of(output: Any) -> list[_Write]:
    """The writes of a trace, in order."""
    return [call for call in calls_of(output) if isinstance(call, _Write)]


def _container_of(tx: Any, variable: Any) -> Any:
    """The container that a variable stands for if nothing in the trace has read it, otherwise None."""
    # Not isinstance, which reads the container.
    if type(variable) is not LazyVariableTracker or variable.is_realized():
        return None
    value, output = variable.peek_value(), tx.output
    # In the graphs of higher-order operators, such as checkpoints, Dynamo allows no side effects.
    is_plain = type(value) in _METHODS and value not in output.side_effects and output.current_tracer.parent is None
    return value if is_plain else None


def _load_attr(is_enabled: Callable[[], bool], original: Any, tx: Any, name: str) -> None:
    container = _container_of(tx, tx.stack[-1]) if is_enabled() else None
    if container is None or name not in _METHODS[type(container)]:
        original(tx, name)
    else:
        tx.push(_Method(tx.pop(), name))


def _call_method(
    is_enabled: Callable[[], bool], original: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any
) -> Any:
    if is_enabled() and not kwargs and _keep(tx, variable, name, args):
        return ConstantVariable.create(None)
    return original(variable, tx, name, args, kwargs)


def _call_builtin(is_enabled: Callable[[], bool], original: Any, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if is_enabled() and variable.fn is len and type(_container_of(tx, args[0])) is list:
        return _length(tx, args[0])
    if is_enabled() and variable.fn in (operator.iadd, operator.isub):
        _as_counter(tx, args[0])
    if is_enabled() and len(args) == 2:
        method = _IN_PLACE.get((variable.fn, type(_container_of(tx, args[0]))))
        if method is not None and _keep(tx, args[0], method, args[1:]):
            return args[0]
    return original(variable, tx, args, kwargs)


def _set_attribute(
    is_enabled: Callable[[], bool], original: Any, variable: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Leaves out the assignment in `self.outputs += [x]`."""
    if is_enabled() and len(args) == 3 and _is_own_attribute(tx, *args):
        return ConstantVariable.create(None)
    return original(variable, tx, args, kwargs)


def _is_instance(original: Any, variable: Any, cls: type) -> bool:
    # Dynamo asks this of every element of a dictionary.
    return original(variable, cls) if cls is not DeletedVariable or variable.is_realized() else False


def _as_counter(tx: Any, variable: Any) -> None:
    """Makes an attribute that the program counts with a symbolic number; torch does so when its value has changed."""
    if type(variable) is LazyConstantVariable and not variable.is_realized() and variable.peek_type() is int:
        if isinstance(variable.source, AttrSource):
            VariableBuilder(tx, variable.source).wrap_symint(variable.peek_value(), DimDynamic.DYNAMIC)


def _length(tx: Any, variable: Any) -> Any:
    """The length of a list, as a number that can change like others."""
    install_guard(variable.source.make_guard(GuardBuilder.TYPE_MATCH))
    source = CallFunctionNoArgsSource(AttrSource(variable.source, "__len__"))
    length = copy.copy(VariableBuilder(tx, source)(list.__len__(variable.peek_value())).realize())
    # By the source it would be read again behind the writes.
    length.source = None
    for write in _writes_of(tx.output):
        if write.container is variable.peek_value():
            length = _length_after(tx, write, length)
    return length


def _length_after(tx: Any, write: _Write, length: Any) -> Any:
    if write.method == "clear":
        return ConstantVariable.create(0)
    added = len(write.arguments[0].items) if write.method in _BY_CONTENTS else 1
    return BuiltinVariable(operator.add).call_function(tx, [length, ConstantVariable.create(added)], {})


def _is_own_attribute(tx: Any, owner: Any, name: Any, value: Any) -> bool:
    """Whether a value that is assigned to an attribute is a container, and the attribute's value before."""
    if _container_of(tx, value) is None or owner.source is None:
        return False
    name = name.as_python_constant()
    is_replaced = tx.output.side_effects.has_pending_mutation_of_attr(owner.realize(), name)
    return value.source.name == f"{owner.source.name}.{name}" and not is_replaced


def _keep(tx: Any, variable: Any, method: str, args: Sequence[Any]) -> bool:
    """Keeps a call for later if it only writes; returns whether it does."""
    container = _container_of(tx, variable)
    if container is None or method not in _METHODS[type(container)]:
        return False
    if method in _WITHOUT_RESULT and tx.instructions[tx.instruction_pointer].opname != "POP_TOP":
        return False
    if method in _BY_CONTENTS:
        copied = _copy(args[0]) if len(args) == 1 else None
        if copied is None:
            return False
        args = [copied]
    install_guard(variable.source.make_guard(GuardBuilder.TYPE_MATCH))
    calls_of(tx.output).append(_Write(container, variable.source, method, args))
    return True


def _copy(variable: Any) -> Any:
    """A copy of a container that the program has created, or None."""
    if variable.source is not None:
        return None
    if isinstance(variable, BaseListVariable):
        return TupleVariable(list(variable.items))
    if type(variable) is ConstDictVariable:
        return variable.clone(mutation_type=None)
    return None


def _wrap(original: Any, builder: Any, value: Any) -> Any:
    """The variable of a container that is read after all: it has been written to."""
    variable, output = original(builder, value), builder.tx.output
    own = [write for write in _writes_of(output) if write.container is value]
    if own:
        calls = calls_of(output)
        calls[:] = [call for call in calls if all(call is not write for write in own)]
        for write in own:
            alias = make_dupe_guard(write.source, builder.source)
            if alias is not None:
                install_guard(write.source.make_guard(alias))
            variable.call_method(builder.tx, write.method, list(write.arguments), {})
    return variable
