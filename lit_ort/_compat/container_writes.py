"""Makes Dynamo trace a write into a container without reading the container.

By default Dynamo traces `self.outputs.append(x)` by reading the list and writing it anew, so that a step whose list
grows is compiled for every length. Here such a write is kept as a call that is made behind the graph, in the order of
the program, and the container is read, with guards on its contents, only if the same trace needs these. A number that
is counted is symbolic from the first trace on. What reads a container or a string that keeps changing runs outside of
graphs.
"""

from __future__ import annotations

import collections
import copy
import dis
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch._dynamo
from torch._dynamo.bytecode_transformation import create_call_method, create_instruction
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard, make_dupe_guard, strip_local_scope
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, LocalSource
from torch._dynamo.symbolic_convert import (
    InstructionTranslator,
    InstructionTranslatorBase,
    break_graph_if_unsupported,
)
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    ConstDictVariable,
    DeletedVariable,
    TupleVariable,
    hashable,
)
from torch._dynamo.variables import builtin as builtins_of_dynamo
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.lazy import LazyConstantVariable, LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable, RangeVariable
from torch._dynamo.variables.misc import GetAttrVariable, UnknownVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._guards import ChainedSource
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils.weak import WeakIdKeyDictionary

from lit_ort._compat.deferred_calls import (
    CONTAINERS,
    JUMPS,
    calls_of,
    defer_calls,
    is_unread,
    replace_instructions,
    replace_method,
)
from lit_ort._compat.value_checks import can_be_caught

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
        collections.Counter: _OF_DICTIONARIES,
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
# Methods that raise nothing; others may find that an element has no hash, or is no pair.
_NEVER_FAIL = frozenset({"append", "appendleft", "clear", "insert", "extend", "extendleft"})
# Methods of dictionaries of which this is true if the program drops their result.
_WITHOUT_RESULT = frozenset({"setdefault"})
# Methods whose argument is itself a container, which the program can change before the call is made.
_BY_CONTENTS = frozenset({"extend", "extendleft", "update"})
_COPIED = frozenset({list, tuple, dict})
# Functions of a container's length alone.
_OF_LENGTH = frozenset({len, bool, operator.truth, operator.not_})
# So many contents of one container are compiled for. A list that is filled once, or has a few lengths, has fewer.
_MOST_CONTENTS = 3
_READ_LATER = "Read it in a hook such as on_train_epoch_end; append() and len() don't end a graph."
_ASSIGN = "Assign items, as in `d[key] = value`, or keep the key out of the step."
# Instructions that push one value, and behind which Dynamo does not continue by default if it can't trace them.
_INSTRUCTIONS = frozenset({"BINARY_OP", "CONTAINS_OP", "GET_ITER", "BUILD_MAP", "FORMAT_VALUE", "FORMAT_SIMPLE"})


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
    contents = WeakIdKeyDictionary()
    replace_method(VariableBuilder, "_wrap", functools.partial(_wrap, is_enabled, contents))
    keys: Any = hashable
    keys.specialize_symnode = functools.partial(_specialize, is_enabled, contents, keys.specialize_symnode)
    replace_instructions(dis.opmap.keys() & _INSTRUCTIONS, functools.partial(_continue_behind, is_enabled))
    replace_instructions(JUMPS, functools.partial(_jump, is_enabled))
    replace_instructions(("STORE_SUBSCR",), functools.partial(_store_item, is_enabled))
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
    if is_enabled() and args and variable.fn in _OF_LENGTH:
        length = _length(tx, args[0])
        if length is not None:
            return length if variable.fn is len else original(variable, tx, [length], kwargs)
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
    """The length of a container that nothing has read, as a number that can change like others; None for others."""
    container = _container_of(tx, variable)
    writes = [write for write in _writes_of(tx.output) if write.container is container]
    # Torch has no guard for an attribute of a dictionary.
    if container is None or type(container) is dict or (writes and type(container) is not list):
        return None
    install_guard(variable.source.make_guard(GuardBuilder.TYPE_MATCH))
    source = CallFunctionNoArgsSource(AttrSource(variable.source, "__len__"))
    length = copy.copy(VariableBuilder(tx, source)(len(container)).realize())
    # By the source it would be read again behind the writes.
    length.source = None
    for write in writes:
        length = _length_after(tx, write, length)
    return length


def _length_after(tx: Any, write: _Write, length: Any) -> Any:
    if write.method == "clear":
        return ConstantVariable.create(0)
    added = (
        BuiltinVariable(len).call_function(tx, list(write.arguments), {})
        if write.method in _BY_CONTENTS
        else ConstantVariable.create(1)
    )
    return BuiltinVariable(operator.add).call_function(tx, [length, added], {})


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
    # An error behind the graph would not reach the program's handler.
    if method not in _NEVER_FAIL and can_be_caught(tx, ()):
        return False
    if method in _WITHOUT_RESULT and tx.instructions[tx.instruction_pointer].opname != "POP_TOP":
        return False
    if method in _BY_CONTENTS:
        copied = _copy(tx, args[0]) if len(args) == 1 else None
        if copied is None:
            return False
        args = [copied]
    install_guard(variable.source.make_guard(GuardBuilder.TYPE_MATCH))
    calls_of(tx.output).append(_Write(container, variable.source, method, args))
    return True


def _copy(tx: Any, variable: Any) -> Any:
    """A container as it is now: a copy of one that the program has created, or one that nothing has read or written.

    None for others.
    """
    if is_unread(tx, variable) and variable.peek_type() in _COPIED:
        value = variable.peek_value()
        return None if any(write.container is value for write in _writes_of(tx.output)) else variable
    if isinstance(variable, LocalGeneratorObjectVariable):
        return BuiltinVariable(tuple).call_function(tx, [variable], {})
    if isinstance(variable, RangeVariable):
        # Its items are its bounds.
        is_known = variable.is_python_constant()
        return TupleVariable(variable.unpack_var_sequence(tx)) if is_known else None
    return _copy_of(variable) if variable.source is None else None


def _copy_of(variable: Any) -> Any:
    """A copy of a container that has been read, or None."""
    if isinstance(variable, BaseListVariable):
        return TupleVariable(list(variable.items))
    if type(variable) is ConstDictVariable:
        return variable.clone(mutation_type=None)
    return None


def _jump(is_enabled: Callable[[], bool], original: Any, tx: Any, inst: Any) -> None:
    """Decides a branch on a container by its length."""
    length = _length(tx, tx.stack[-1]) if is_enabled() else None
    if length is not None:
        tx.stack[-1] = length
    original(tx, inst)


def _store_item(is_enabled: Callable[[], bool], original: Any, tx: Any, inst: Any) -> None:
    value, container, key = tx.stack[-3:]
    if is_enabled() and _keep(tx, container, "__setitem__", [key, value]):
        tx.popn(3)
    else:
        original(tx, inst)


def _continue_behind(is_enabled: Callable[[], bool], original: Any, tx: Any, inst: Any) -> None:
    """Traces the code behind an instruction that can't be traced, as Dynamo does behind calls."""
    if is_enabled():
        original = break_graph_if_unsupported(push=True, msg_prefix=inst.opname)(original)
    original(tx, inst)


def _read(contents: Any, root: Any, owner: Any, name: str, value: Any) -> None:
    """Ends the graph before a statement that reads what has been read with several contents.

    If Dynamo would leave the whole function in eager for it, and that is an error, the graph goes on.
    """
    known = set() if owner is None else contents.setdefault(owner, {}).setdefault(name, set())
    known.add(value if isinstance(value, (str, int)) else len(value))
    if len(known) <= _MOST_CONTENTS:
        return
    if torch._dynamo.config.suppress_errors or (root.should_compile_partial_graph() and not root.maybe_has_backedge()):
        explanation = f"`{strip_local_scope(name)}` changes at each call."
        unimplemented(
            gb_type="Contents that change",
            context=name,
            explanation=explanation,
            hints=[_ASSIGN if isinstance(value, int) else _READ_LATER],
        )


def _specialize(is_enabled: Callable[[], bool], contents: Any, original: Any, variable: Any) -> Any:
    """The constant for a number that is looked up in a dictionary or a set."""
    constant, number = original(variable), variable.unwrap()
    if is_enabled() and isinstance(number, SymNodeVariable):
        root: Any = InstructionTranslator.current_tx().output.root_tx
        name = str(number.sym_num) if number.source is None else number.source.name
        _read(contents, root, root.f_code, name, constant.as_python_constant())
    return constant


def owner_of(root: Any, source: Any) -> Any:
    """The object that lives as long as the contents at a source are of interest, or None.

    That is the module whose attribute is read, and not a batch. What follows a graph break has its value as a local
    variable.
    """
    base = source.get_base() if isinstance(source, ChainedSource) else source
    value = root.f_locals.get(base.local_name) if isinstance(base, LocalSource) else None
    if base is not source and type(value).__weakrefoffset__:
        return value
    return root.f_code if root.f_code.co_name.startswith("torch_dynamo_resume_in") else None


def _wrap(is_enabled: Callable[[], bool], contents: Any, original: Any, builder: Any, value: Any) -> Any:
    """The variable of a container that is read after all: it has been written to."""
    output = builder.tx.output
    is_constant = type(value) is str and builder.allow_lazy_constant
    if is_enabled() and type(value) in CONTAINERS and not is_constant:
        if output.should_exit:
            # Code behind the graph takes the object as it is.
            return UnknownVariable(source=builder.source)
        _read(contents, output.root_tx, owner_of(output.root_tx, builder.source), builder.source.name, value)
    variable = original(builder, value)
    calls = calls_of(output)
    for k, write in enumerate(calls):
        if isinstance(write, _Write) and write.method in _BY_CONTENTS and _is_value(write.arguments[0], value):
            _guard_alias(builder.source, write.arguments[0].source)
            calls[k] = write._replace(arguments=[_copy_of(variable)])
    own = [write for write in _writes_of(output) if write.container is value]
    if own:
        calls[:] = [call for call in calls if all(call is not write for write in own)]
        for write in own:
            _guard_alias(builder.source, write.source)
            variable.call_method(builder.tx, write.method, list(write.arguments), {})
    return variable


def _is_value(variable: Any, value: Any) -> bool:
    """Whether a variable that nothing has read stands for a value."""
    return type(variable) is LazyVariableTracker and not variable.is_realized() and variable.peek_value() is value


def _guard_alias(source: Any, other: Any) -> None:
    """Makes the trace valid only if two sources are the same object."""
    alias = make_dupe_guard(other, source)
    if alias is not None:
        install_guard(other.make_guard(alias))
