"""Turns Dynamo's events into reports with the line of the user's code, the reason and a remedy."""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
from pathlib import Path

from lit_ort._compat.dynamo_events import BRANCH, EXCEPTION, RECOMPILE_LIMIT, Function, Obstacle, Stack
from lit_ort._compat.torch_dynamo import MODULE_CALLS
from lit_ort.errors import DEFECT
from lit_ort.runtime.report import EagerFunction, GraphBreak, Recompile

# Packages with code that users don't change.
_PACKAGES = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_utilities",
    "lit_ort",
    "torchmetrics",
)

# The reason of the functions that lit_ort disables, in torch's message about them.
DISABLED = "lit_ort runs it outside of graphs"

_CALL_IN_A_HOOK = "Call it in a hook such as on_train_batch_end."
_PRINT_IN_A_HOOK = "Print in a hook such as on_train_batch_end, or log the value with self.log."
# The remedy for a guard that fails.
KEEP_OUT = "If the value keeps changing, pass it as a tensor or keep it out of the step."
_READS_VALUE = (
    "the step reads the value of a tensor, as item(), float() and numpy() do.",
    "Keep the value a tensor; self.log accepts tensors.",
)

# By torch's kind of obstacle: the reason, or None for torch's own explanation, and the remedy.
_KNOWN: dict[str, tuple[str | None, str | None]] = {
    BRANCH: ("a branch depends on the value of a tensor.", "Use torch.where, or move the branch out of the step."),
    "BUILD_STRING type error": (
        "an f-string contains a number that changes from call to call.",
        "Build the string in a hook such as on_train_batch_end, or keep the number out of it.",
    ),
    "Data dependent operator": _READS_VALUE,
    "Tensor.tolist() with non-integer tensor": _READS_VALUE,
    "Unsupported Tensor.item() call with capture_scalar_outputs=False": _READS_VALUE,
    "using `torch.autograd.grad` with `torch._dynamo.config.trace_autograd_ops=False`": (
        "torch.autograd.grad is not part of a graph.",
        None,
    ),
    "Unsupported Tensor.requires_grad_() call": (
        "requires_grad_() changes a tensor that the step reads.",
        "Call it in a hook such as on_train_epoch_start, or detach the result.",
    ),
    "Unsupported functorch tracing attempt": ("a transform of torch.func runs it, outside of a graph.", None),
    "Dynamic shape operator": (
        None,
        "Multiply with a mask or use torch.where, so that shapes don't depend on values that the graph computes.",
    ),
}
# Kinds about a function that is called.
_CALLS = (
    "Attempted to call function marked as skipped",
    "Attempted to inline function marked as skipped",
    "Failed to trace builtin operator",
)
# The kind of a function that asks to be skipped.
_SKIPPED = "Call to `torch._dynamo.skip_frame()`"
# The kind of a generator that code outside of graphs starts.
_GENERATOR = "Attempt to trace generator"
# Kinds that the user's code asks for.
_ASKED_FOR = (
    "Call to `torch._dynamo.graph_break()`",
    "Skip calling `torch.compiler.disable()`d function",
    "Skip inlining `torch.compiler.disable()`d function",
)
# Everything of the above: the kinds that torch has to have.
KINDS = frozenset((*_KNOWN, *_CALLS, _SKIPPED, _GENERATOR, EXCEPTION, RECOMPILE_LIMIT, *_ASKED_FOR))

# A function's name in torch's explanations, such as "builtin operator `print`" or "function `<function A.f at 0x7f>`".
_NAME = re.compile(r"(?:builtin operator|builtin|function) `?(?:<unknown module>\.)?(?:<function )?(?P<name>[\w.]*\w)")
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
# What guards are about, as the user writes it.
_NAMES = (
    (re.compile(r"___stack\d+"), "(value at the graph break)"),
    (re.compile(r"G\['__lit_ort_selection_[^']*'\]\((.*?)\)(?=\.s)"), r"(selection by \1)"),
    (re.compile(r"\w+\._trainer\.fit_loop\.epoch_loop\.\w+_optimization\.[\w.]*completed"), "self.global_step"),
    (re.compile(r"\w+\._trainer\.fit_loop\.epoch_progress\.[\w.]*(completed|processed)"), "self.current_epoch"),
)
_DISPATCH_KEYS = "dispatch key set mismatch"
_NUMBER = re.compile(r"[\w.\[\]'\"]+ == -?\d[\d.e+-]*")
# Words of hints that are no remedy: about torch's settings and issue tracker, or of a general kind.
_NO_REMEDY = ("torch._dynamo", "issue", "fullgraph", "TORCH", "is fundamental", "running in eager")
_LIMIT = re.compile(r"currently set to (?P<limit>\d+)")
_RAISED = re.compile(r"raised exception (?P<exception>.+)")
_LIMIT_REMEDY = (
    "Run with TORCH_LOGS=recompiles to see which value changes; pass it as a tensor, or keep it out of the step."
)
_CONTAINS = re.compile(r"(?P<no>not )?___dict_contains\((?P<key>'[^']*'), (?P<owner>.+)\)")


def graph_break_of(step: str | None, obstacle: Obstacle, resumes: bool = True) -> GraphBreak | None:
    """The report of a graph break; None if no line of the stack is the user's, or if the step raises an exception."""
    place = place_of(obstacle.stack)
    if place is None or obstacle.kind in (_SKIPPED, EXCEPTION):
        return None
    reason, remedy = _explained(obstacle)
    if not resumes:
        reason = f"{reason} The rest of the function runs in eager PyTorch."
    return GraphBreak(step, place, reason, remedy, by_design=_is_by_design(obstacle))


def eager_function_of(step: str | None, obstacle: Obstacle, function: Function) -> EagerFunction | None:
    """The report of a function that Dynamo leaves in eager.

    None for a library's function, unless Dynamo failed there or it is a module's that is compiled itself, and for a
    function that asks to be skipped.
    """
    is_module = function.file == MODULE_CALLS
    if obstacle.kind == _SKIPPED:
        return None
    if obstacle.kind == _GENERATOR and "site-packages" in function.file:
        return None
    if _is_library(function.file) and not (is_module or obstacle.is_error):
        return None
    place = place_of(obstacle.stack) or f"{function.file}:{function.line}"
    reason, remedy = _explained(obstacle)
    name = _COMPILED_MODULE if is_module else _name(function)
    return EagerFunction(step, name, place, reason, remedy, is_rest=function.continues)


_COMPILED_MODULE = "the compiled module"


def is_raised_by_user(obstacle: Obstacle) -> bool:
    """Whether code of the user's raises an exception, as far as Dynamo can tell."""
    return obstacle.kind == EXCEPTION and bool(obstacle.stack) and not _is_library(obstacle.stack[-1][0])


def recompile_of(step: str | None, function: Function, reason: str, stack: Stack) -> Recompile | None:
    """The report of a recompile.

    None for a library's function, and for tensors of inference mode: Lightning validates in that mode and also without
    it, and torch compiles for each.
    """
    if _is_library(function.file) or _DISPATCH_KEYS in reason:
        return None
    place = place_of(stack) or f"{function.file}:{function.line}"
    # The text of a guard ends with its line of code as a comment; a comparison of tensors has none.
    guard, _, line = reason.partition("  #")
    if not line:
        # What follows is about torch's settings.
        text = _readable(reason.partition(". Guard failed on ")[0]).replace(". expected", ": expected")
        return Recompile(step, _name(function), place, _sentence(text), None)
    guard = guard.strip()
    # Dynamo makes the number symbolic in the next graph.
    remedy = None if _NUMBER.fullmatch(guard) else KEEP_OUT
    return Recompile(step, _name(function), place, f"the guard `{_readable(guard)}` failed.", remedy)


def _readable(guard: str) -> str:
    for pattern, name in _NAMES:
        guard = pattern.sub(name, guard)
    match = _CONTAINS.fullmatch(guard)
    return guard if match is None else f"{match['key']} {match['no'] or ''}in {match['owner']}"


def _name(function: Function) -> str:
    return f"{function.name} from line {function.line} on" if function.continues else function.name


def place_of(stack: Stack) -> str | None:
    """The innermost line of a stack that is not a library's, as `file:line`; None if there is none."""
    return next((f"{file}:{line}" for file, line in reversed(stack) if not _is_library(file)), None)


def _explained(obstacle: Obstacle) -> tuple[str, str | None]:
    """The reason and the remedy of an obstacle."""
    if obstacle.defect is not None:
        described = f"{obstacle.kind}: {obstacle.explanation}, at {obstacle.defect}"
        return f"Dynamo can't trace it because of {DEFECT}: {described}.", "Please report it."
    if obstacle.is_error:
        return _sentence(
            f"Dynamo can't trace it: {obstacle.kind}: {obstacle.explanation}"
        ), "TORCH_LOGS=dynamo shows more."
    if obstacle.kind == RECOMPILE_LIMIT:
        return _limit_reason(obstacle), _LIMIT_REMEDY
    if obstacle.kind == EXCEPTION:
        return f"an exception is raised while Dynamo traces it: {_exception_of(obstacle)}.", None
    match = _NAME.search(obstacle.explanation)
    function = "a function" if match is None else match["name"]
    if is_own(obstacle):
        return f"lit_ort runs `{function}` outside of graphs.", None
    if obstacle.kind in _KNOWN:
        reason, remedy = _KNOWN[obstacle.kind]
        return reason or _sentence(obstacle.explanation), remedy
    if obstacle.kind in _CALLS:
        return f"Dynamo can't trace `{function}`.", _PRINT_IN_A_HOOK if function == "print" else _CALL_IN_A_HOOK
    hints = (
        hint
        for hint in obstacle.hints
        if not hint.startswith("see https:") and not any(word in hint for word in _NO_REMEDY)
    )
    return _sentence(_ADDRESS.sub("", _readable(obstacle.explanation))), next(map(_sentence, hints), None)


def _limit_reason(obstacle: Obstacle) -> str:
    match = _LIMIT.search(obstacle.text)
    times = "as often as torch's settings allow" if match is None else f"{match['limit']} times"
    return f"it was compiled {times}, and each new value of something it reads needs another graph."


def _exception_of(obstacle: Obstacle) -> str:
    match = _RAISED.search(obstacle.text)
    return "of unknown type" if match is None else match["exception"]


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def is_own(obstacle: Obstacle) -> bool:
    """Whether lit_ort keeps a function out of graphs: it disables it, or leaves its package untraced."""
    return DISABLED in obstacle.text or "/torchmetrics/" in obstacle.text


def _is_by_design(obstacle: Obstacle) -> bool:
    # No optimizer of torch's is traced, and manual optimization calls one in the step.
    return is_own(obstacle) or "`Optimizer." in obstacle.explanation or obstacle.kind in _ASKED_FOR


@functools.cache
def _is_library(file: str) -> bool:
    """Whether a file is one of torch's, Lightning's, lit_ort's or Python's own."""
    # Code that runs is in an imported package; a search for the others would run the hooks of their import.
    origins = (getattr(sys.modules.get(package), "__file__", None) for package in _PACKAGES)
    if file.startswith("<frozen") or any(origin and file.startswith(f"{Path(origin).parent}/") for origin in origins):
        return True
    return file.startswith(sysconfig.get_path("stdlib") + "/") and "site-packages" not in file
