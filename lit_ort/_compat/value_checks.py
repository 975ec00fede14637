"""Makes Dynamo trace `if tensor: raise ...` and `assert tensor` without a graph break.

By default a branch that depends on a value ends the graph. If one side of it does nothing but raise, the trace goes on
along the other side here, and whether the check failed becomes a result of the graph. Behind the graph, the statements
that raise run with the values that their variables had at the check, so that type and message are those of eager.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._dynamo.bytecode_analysis import JUMP_OPCODES, TERMINAL_OPCODES, livevars_analysis
from torch._dynamo.bytecode_transformation import (
    create_call_function,
    create_instruction,
    create_jump_absolute,
    parse_exception_table,
    transform_code_object,
)
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    ListVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    TupleVariable,
    UnspecializedPythonVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import SizeVariable
from torch._dynamo.variables.misc import CellVariable, DeletedVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from lit_ort._compat.deferred_calls import JUMPS, calls_of, defer_calls, replace_instructions

# In the metadata of a node of Dynamo's graph: it is true if a check has failed.
FAILED = "lit_ort_failed"

# Statements that raise are a few lines long.
_MOST_INSTRUCTIONS = 400
_BY_ITEMS: Mapping[type, type] = types.MappingProxyType(
    {TupleVariable: tuple, ListVariable: list, SizeVariable: torch.Size}
)
_NO_ARGUMENT_LISTS = ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)


# Whose frames are between the program's and the trace.
_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__)


class _NotKept(Exception):
    """A variable whose value can't be kept for later."""


class _Statements:
    """The statements of a check that raise.

    Args:
        function: has them as its body.
        arguments: make its arguments.
    """

    def __init__(self, function: types.FunctionType, arguments: Sequence[_Kept]) -> None:
        self._function, self._arguments = function, arguments

    def __call__(self, failed: torch.Tensor, *values: Any) -> None:
        if failed:
            # Dynamo would trace what they call.
            run: Any = torch.compiler.disable(self._raise)
            run(values)

    def _raise(self, values: Sequence[Any]) -> None:
        made: dict[_Kept, Any] = {}
        self._function(*[kept.value(values, made) for kept in self._arguments])


@dataclasses.dataclass(frozen=True)
class _Check:
    statements: _Statements
    arguments: Sequence[Any]

    def write(self, cg: Any) -> None:
        name = cg.tx.output.install_global_by_id("__lit_ort_check", self.statements)
        cg.extend_output(cg.load_function_name(name, True))
        for argument in self.arguments:
            cg(argument)
        cg.extend_output([*create_call_function(len(self.arguments), False), create_instruction("POP_TOP")])


def keep_checks(is_enabled: Callable[[], bool]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether checks are kept in the trace at hand.
    """
    # It is called behind each graph.
    skip_code(_Statements.__call__.__code__)
    defer_calls()
    replace_instructions(JUMPS, functools.partial(_jump, is_enabled))


def _jump(is_enabled: Callable[[], bool], original: Callable[..., None], tx: Any, inst: Any) -> None:
    # Not isinstance, which reads inputs that may not be needed.
    if is_enabled() and type(tx.stack[-1]) is TensorVariable:
        following = _kept(tx, inst)
        if following is not None:
            tx.pop()
            tx.instruction_pointer = tx.indexof[following]
            return
    original(tx, inst)


def _kept(tx: Any, inst: Any) -> Any:
    """Keeps a check for later; returns the instruction at which the trace goes on, or None if a branch is no check."""
    sides = (inst.target, tx.next_instruction)
    bodies = [_raising(tx.instructions, tx.indexof, side) for side in sides]
    if all(bodies) or not any(bodies) or can_be_caught(tx, bodies[0] or bodies[1] or ()):
        return None
    # In the graphs of higher-order operators, such as checkpoints, Dynamo allows no side effects.
    if tx.output.current_tracer.parent is not None or tx.output.export:
        return None
    fails_by_jump = bool(bodies[0])
    snapshot = _Snapshot(tx)
    try:
        statements = _statements(tx, sides[0] if fails_by_jump else sides[1], snapshot)
    except _NotKept:
        return None
    fails_if_true = inst.opname.endswith("IF_TRUE") is fails_by_jump
    test = TorchInGraphFunctionVariable(torch.ne if fails_if_true else torch.eq)
    # A value of its own, which nothing can change in place.
    failed = test.call_function(tx, [tx.stack[-1], ConstantVariable.create(0)], {})
    failed.as_proxy().node.meta[FAILED] = True
    calls_of(tx.output).append(_Check(statements, [failed, *snapshot.variables]))
    return sides[1] if fails_by_jump else sides[0]


def _raising(instructions: Sequence[Any], index_of: Mapping[Any, int], first: Any) -> Sequence[Any]:
    """The instructions that follow one if all of them lead to a statement that raises, otherwise none."""
    found, to_visit = {}, [index_of[first]]
    while to_visit:
        index = to_visit.pop()
        if index in found:
            continue
        inst = found[index] = instructions[index]
        if len(found) > _MOST_INSTRUCTIONS or _leaves_statements(inst):
            return ()
        if inst.opcode in JUMP_OPCODES:
            to_visit.append(index_of[inst.target])
        if inst.opcode not in TERMINAL_OPCODES:
            to_visit.append(index + 1)
    return [found[index] for index in sorted(found)]


def _leaves_statements(inst: Any) -> bool:
    """Whether an instruction returns, suspends, enters a context, needs a cell or raises an exception anew."""
    name = inst.opname
    if name == "RAISE_VARARGS":
        return inst.arg == 0
    needs_cell = inst.opcode in dis.hasfree and name != "LOAD_DEREF"
    return needs_cell or name.startswith(("RETURN", "YIELD", "SETUP", "BEFORE", "RERAISE", "PUSH_EXC", "LOAD_SPECIAL"))


def can_be_caught(tx: Any, body: Sequence[Any]) -> bool:
    """Whether the program may catch what the statements raise, or handles another exception."""
    if len(tx.exn_vt_stack) or any(_is_in_try(tx, inst) for inst in body) or _may_be_caught_in_eager():
        return True
    while tx is not None:
        if tx.f_code.co_flags & inspect.CO_GENERATOR or _is_in_try(tx, tx.current_instruction):
            return True
        # Contexts that are not torch's can suppress exceptions.
        if any(type(context) is GenericContextWrappingVariable for context in tx.active_generic_context_managers):
            return True
        # Python 3.10 has no exception tables.
        if any(block.inst.opname == "SETUP_FINALLY" for block in tx.block_stack):
            return True
        tx = tx.parent
    return False


def _may_be_caught_in_eager() -> bool:
    """Whether the function at hand is called in a `try` or `with` block, by one that Dynamo leaves in eager."""
    frame = sys._getframe()
    while frame is not None and not _is_entry(frame.f_code):
        if not frame.f_code.co_filename.startswith(_LIBRARIES) and _is_in_block(frame):
            return True
        frame = frame.f_back
    return False


def _is_entry(code: types.CodeType) -> bool:
    """Whether it is what the program calls instead of a compiled function."""
    return code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__


def _is_in_block(frame: types.FrameType) -> bool:
    code = frame.f_code
    if sys.version_info < (3, 11):
        return any(inst.opname.startswith("SETUP_") for inst in dis.get_instructions(code))
    return any(entry.start <= frame.f_lasti <= entry.end for entry in parse_exception_table(code.co_exceptiontable))


def _is_in_try(tx: Any, inst: Any) -> bool:
    """Whether an exception of an instruction is handled by anything but the end of a `with` block."""
    entry = inst.exn_tab_entry
    while entry is not None:
        handler = tx.indexof[entry.target]
        names = [following.opname for following in tx.instructions[handler : handler + 2]]
        if names not in (["PUSH_EXC_INFO", "WITH_EXCEPT_START"], ["COPY", "POP_EXCEPT"]):
            return True
        entry = entry.target.exn_tab_entry
    return False


def _statements(tx: Any, first: Any, snapshot: _Snapshot) -> _Statements:
    """The statements that begin at an instruction, with the values that their variables have now.

    Raises:
        _NotKept: they can't be kept.
    """
    names = sorted(livevars_analysis(tx.instructions, first))
    if first.offset is None or not all(name in tx.symbolic_locals for name in names):
        raise _NotKept
    arguments = [snapshot.of(_local(tx, name)) for name in names]
    code, _ = transform_code_object(tx.f_code, functools.partial(_keep_statements, first.offset, names))
    return _Statements(types.FunctionType(code, tx.f_globals, tx.f_code.co_name), arguments)


def _local(tx: Any, name: str) -> Any:
    variable = tx.symbolic_locals[name]
    return tx.output.side_effects.load_cell(variable) if isinstance(variable, CellVariable) else variable


def _keep_statements(offset: int, names: Sequence[str], instructions: list[Any], options: dict[str, Any]) -> None:
    """Turns the code of a function into that of its statements from an offset on; their variables become arguments."""
    index_of = {inst: index for index, inst in enumerate(instructions)}
    first = next(inst for inst in instructions if inst.offset == offset)
    body = _raising(instructions, index_of, first)
    for inst in body:
        inst.exn_tab_entry = None
        if inst.opname == "LOAD_DEREF":
            inst.opname, inst.opcode, inst.arg = "LOAD_FAST", dis.opmap["LOAD_FAST"], None
    start = [create_instruction("RESUME", arg=0)] if "RESUME" in dis.opmap else []
    jump = [] if body[0] is first else [create_jump_absolute(first)]
    instructions[:] = [*start, *jump, *body]
    others = tuple(name for name in options["co_varnames"] if name not in names)
    options.update(co_varnames=(*names, *others), co_cellvars=(), co_freevars=())
    options.update(co_argcount=len(names), co_posonlyargcount=0, co_kwonlyargcount=0)
    options["co_flags"] &= _NO_ARGUMENT_LISTS


class _Kept:
    """Makes the value that a variable had at a check.

    Args:
        make: makes it, from values of variables behind the graph and the parts.
        parts: what it contains.

    Attributes:
        attributes: what the program had assigned to its attributes.
    """

    def __init__(self, make: Callable[[Sequence[Any], Sequence[Any]], Any], parts: Sequence[_Kept] = ()) -> None:
        self._make, self._parts = make, parts
        self.attributes: dict[str, _Kept] = {}

    def value(self, values: Sequence[Any], made: dict[_Kept, Any]) -> Any:
        """The value.

        Args:
            values: those of the snapshot's variables.
            made: the values that were made before.
        """
        if self not in made:
            made[self] = self._make(values, [part.value(values, made) for part in self._parts])
            for name, attribute in self.attributes.items():
                setattr(made[self], name, attribute.value(values, made))
        return made[self]


class _Snapshot:
    """The values of variables at one instruction.

    Args:
        tx: Dynamo's translator.

    Attributes:
        variables: those whose values are needed behind the graph.
    """

    def __init__(self, tx: Any) -> None:
        self._tx = tx
        self._kept: dict[Any, _Kept] = {}
        self.variables: list[Any] = []

    def of(self, variable: Any) -> _Kept:
        """What makes the value of a variable.

        Raises:
            _NotKept: the value is none of those that are supported.
        """
        is_input = type(variable) is LazyVariableTracker and not variable.is_realized()
        if type(variable) is LazyVariableTracker and not is_input:
            variable = variable.realize()
        if variable not in self._kept:
            kept = self._kept[variable] = self._read(variable) if is_input else self._made(variable)
            # An object can contain itself.
            changed = {} if is_input else self._tx.output.side_effects.store_attr_mutations.get(variable, {})
            kept.attributes.update((name, self.of(value)) for name, value in changed.items() if not _is_deleted(value))
        return self._kept[variable]

    def _read(self, variable: Any) -> _Kept:
        position = len(self.variables)
        self.variables.append(variable)
        return _Kept(lambda values, parts: values[position])

    def _made(self, variable: Any) -> _Kept:
        if variable.source is not None or isinstance(variable, (SymNodeVariable, UnspecializedPythonVariable)):
            return self._read(variable)
        kind = type(variable)
        if kind is TensorVariable:
            return self._read(variable.call_method(self._tx, "detach", [], {}))
        if variable.is_python_constant():
            constant = variable.as_python_constant()
            return _Kept(lambda values, parts: constant)
        if kind in _BY_ITEMS:
            make = _BY_ITEMS[kind]
            return _Kept(lambda values, parts: make(parts), [self.of(item) for item in variable.items])
        if kind is ConstDictVariable and variable.user_cls is dict:
            keys = [key.vt.as_python_constant() for key in variable.items]
            return _Kept(
                lambda values, parts: dict(zip(keys, parts, strict=True)), [self.of(v) for v in variable.items.values()]
            )
        if kind is UserDefinedObjectVariable:
            cls = variable.value_type
            return _Kept(lambda values, parts: object.__new__(cls))
        raise _NotKept


def _is_deleted(variable: Any) -> bool:
    return isinstance(variable, DeletedVariable)
