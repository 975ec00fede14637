"""Lists that a step makes of tensors, as by `lengths.tolist()`, and hands to a function that takes the tensor as well.

By default Dynamo ends the graph at `tolist`. Here such a list is a variable that knows its tensor. If the program reads
the list, the trace starts anew, and ends the graph at the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.lazy import LazyCache, LazyVariableTracker

from lit_ort._compat.deferred_calls import replace_method, tensor_method
from lit_ort._compat.selections import call, node_of

# Of the record that Dynamo keeps when it traces a function again: the calls of `tolist` whose lists are read.
_ATTRIBUTE = "_lit_ort_read_lists"
_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})


class UnreadList(LazyVariableTracker):
    """The list of an int[n], whose items nothing in the trace has read.

    Args:
        tensor: the variable of a copy of the tensor, which later writes don't change.
        place: where the list is made: the code and the position of its instruction.
    """

    _nonvar_fields = {"place", *LazyVariableTracker._nonvar_fields}

    def __init__(self, tensor: TensorVariable, place: tuple[CodeType, int | None], **kwargs: Any) -> None:
        super().__init__(LazyCache([], ConstantSource("unread_list")), **kwargs)
        self.tensor = tensor
        self.place = place

    def realize(self) -> NoReturn:
        """Makes Dynamo trace the function again, without this variable."""
        _read_lists(InstructionTranslator.current_tx()).add(self.place)
        raise RestartAnalysis(restart_reason="the step reads a list that tolist() makes of a tensor")


def keep_unread_lists(is_enabled: Callable[[], bool]) -> None:
    """Puts the hook into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether lists stay unread in the trace at hand.
    """
    replace_method(*tensor_method("tolist"), functools.partial(_tolist, is_enabled))


def _tolist(is_enabled: Callable[[], bool], original: Any, variable: Any, tx: Any) -> Any:
    place = tx.f_code, tx.current_instruction.offset
    example = node_of(variable).meta["example_value"]
    is_list = type(variable) is TensorVariable and example.dim() == 1 and example.dtype in _INTEGERS
    is_traced = tx.output.current_tracer.parent is None and not tx.output.export
    if is_enabled() and is_list and is_traced and place not in _read_lists(tx):
        return UnreadList(call(tx, torch.clone, node_of(variable)), place)
    return original(variable, tx)


def _read_lists(tx: Any) -> set[tuple[CodeType, int | None]]:
    return tx.speculation_log.__dict__.setdefault(_ATTRIBUTE, set())
