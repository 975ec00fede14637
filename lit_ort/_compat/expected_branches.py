"""Makes Dynamo trace branches on whether values are finite, such as `if torch.isnan(loss): return`, without a break.

By default a branch that depends on a value ends the graph. These are taken as finite values decide, and whether a value
was another is a result of the graph. If one was, what follows the graph doesn't run: the whole function runs again in
eager, with the same arguments. A graph that writes into its inputs, or sets hooks on them, ends at the branch.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._dynamo.bytecode_transformation import create_call_function, create_instruction
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import SpeculationRestartAnalysis
from torch._dynamo.variables import ConstantVariable, TensorVariable, TorchInGraphFunctionVariable

from lit_ort._compat.deferred_calls import JUMPS, calls_of, defer_calls, replace_instructions
from lit_ort._compat.input_functions import (
    is_unchanged,
    memory_of_example,
    name_of_call,
    writes,
    written_by,
)

# What a finite value makes of a condition.
_OF_FINITE: Mapping[str, bool] = MappingProxyType(
    {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
)
_KEEP = frozenset({"any", "all", "bool", "item", "detach"})
_NEGATE = frozenset({"logical_not", "not_", "bitwise_not", "invert", "__invert__"})
# Of Dynamo's `SpeculationLog`, which outlives a trace that is begun again: its branches end the graph.
_ENDED = "_lit_ort_branches_end"
_JUMP = next(name for name in ("POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_IF_FALSE") if name in dis.opmap)


class _Again:
    """Runs a function again in eager if a branch was not the expected one.

    Args:
        tx: Dynamo's translator of the function.
        failed: whether the branch was another.
        rewind: sets torch's generator to its state before the run.
    """

    def __init__(self, tx: Any, failed: Any, rewind: Callable[[], None]) -> None:
        self._tx, self._rewind = tx, rewind
        self.arguments: Sequence[Any] = [failed]

    def write(self, cg: Any) -> None:
        code, output = self._tx.f_code, self._tx.output
        # Hooks are set before.
        inputs = frozenset(map(memory_of_example, output.graph.find_nodes(op="placeholder"))) - {None}
        # Python's generator would have drawn twice.
        is_changed = output.side_effects.tensor_hooks or output.random_calls
        if is_changed or not all(_keeps_inputs(node, inputs) for node in output.graph.nodes):
            setattr(self._tx.speculation_log, _ENDED, True)
            self._tx.speculation_log.clear()
            raise SpeculationRestartAnalysis(restart_reason="a function that may run again changes its inputs")
        end = create_instruction("NOP")
        again = functools.partial(_in_eager, self._rewind)
        names = [output.install_global_by_id("__lit_ort_branch", function) for function in (bool, again)]
        cg.add_push_null(lambda: cg.append_output(cg.create_load_global(names[0], add=True)))
        cg(self.arguments[0])
        cg.extend_output([*create_call_function(1, False), create_instruction(_JUMP, target=end)])
        # Nothing of what this loads may be kept for the other way.
        cg.clear_tos()
        cg.add_push_null(lambda: cg.append_output(cg.create_load_global(names[1], add=True)))
        loads = [create_instruction("LOAD_CLOSURE", argval=name) for name in code.co_freevars]
        cg.extend_output([*loads, create_instruction("BUILD_TUPLE", arg=len(loads))])
        cg.make_function_with_closure(code.co_name, code)
        arguments = _arguments(code)
        # Assignments follow, so that they have the values of the call.
        kinds = ("LOAD_DEREF" if name in code.co_cellvars else "LOAD_FAST" for name in arguments)
        cg.extend_output([create_instruction(kind, argval=name) for kind, name in zip(kinds, arguments, strict=True)])
        cg.extend_output([*create_call_function(len(arguments) + 1, False), create_instruction("RETURN_VALUE"), end])
        cg.clear_tos()


def _arguments(code: Any) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += sum(bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    return code.co_varnames[:count]


def _in_eager(rewind: Callable[[], None], function: Any, *values: Any) -> Any:
    """Calls a function in eager, with the values of its arguments, the last of which can be lists of more."""
    rewind()
    code = function.__code__
    names = code.co_varnames
    keywords = dict(zip(names[code.co_argcount :], values[code.co_argcount :], strict=False))
    positional = list(values[: code.co_argcount])
    rest = names[code.co_argcount + code.co_kwonlyargcount : len(values)]
    if rest and code.co_flags & inspect.CO_VARARGS:
        positional += keywords.pop(rest[0])
    if rest and code.co_flags & inspect.CO_VARKEYWORDS:
        keywords.update(keywords.pop(rest[-1]))
    run: Any = torch.compiler.disable(function)
    return run(*positional, **keywords)


def keep_expected_branches(is_enabled: Callable[[], bool], rewind_of: Callable[[], Callable[[], None]]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether branches are taken as expected in the trace at hand.
        rewind_of: returns what sets torch's generators to their states before the latest run.
    """
    skip_code(_in_eager.__code__)
    defer_calls()
    replace_instructions(JUMPS, functools.partial(_jump, is_enabled, rewind_of))


def _jump(
    is_enabled: Callable[[], bool],
    rewind_of: Callable[[], Callable[[], None]],
    original: Callable[..., None],
    tx: Any,
    inst: Any,
) -> None:
    if is_enabled() and type(tx.stack[-1]) is TensorVariable:
        expected = _expected(tx.stack[-1].as_proxy().node)
        if expected is not None and _can_run_again(tx):
            test = TorchInGraphFunctionVariable(torch.eq if expected else torch.ne)
            # A value of its own, which nothing can change in place.
            failed = test.call_function(tx, [tx.pop(), ConstantVariable.create(0)], {})
            calls = calls_of(tx.output)
            # Before all calls that change something.
            calls.insert(
                sum(isinstance(call, _Again) for call in calls), _Again(tx.output.root_tx, failed, rewind_of())
            )
            if inst.opname.endswith("IF_TRUE") is expected:
                tx.jump(inst)
            return
    original(tx, inst)


def _expected(node: fx.Node) -> bool | None:
    """What finite values make of a condition; None if it is none about finite values."""
    name = name_of_call(node)
    if name in _OF_FINITE:
        return _OF_FINITE[name]
    if name not in _KEEP | _NEGATE or len(node.all_input_nodes) != 1:
        return None
    inner = _expected(node.all_input_nodes[0])
    return inner if inner is None or name in _KEEP else not inner


def _can_run_again(tx: Any) -> bool:
    root = tx.output.root_tx
    if getattr(root.speculation_log, _ENDED, False) or tx.output.current_tracer.parent is not None or tx.output.export:
        return False
    return not root.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)


def _keeps_inputs(node: fx.Node, inputs: Container[int | None]) -> bool:
    """Whether a node changes no input, as far as can be seen.

    Args:
        inputs: the memory of inputs.
    """
    if node.op == "placeholder":
        return is_unchanged(node)
    # Writes through `.data` are not counted by the version of an input.
    if not writes(node):
        return True
    return not any(memory_of_example(argument) in inputs for argument in written_by(node))
