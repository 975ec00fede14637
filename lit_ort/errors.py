"""One hierarchy of errors; every message says the offending value, the rule it breaks and the remedy."""

from __future__ import annotations

import warnings


class LitOrtError(Exception):
    """Base of everything that lit_ort raises on its own account."""


class OptionsError(LitOrtError, ValueError):
    """A user-visible option has an unknown name or a value outside its rule."""


class UnsupportedError(LitOrtError, ValueError):
    """A setting of Lightning that the strategy can't serve yet."""


class EngineError(LitOrtError):
    """ONNX Runtime is not installed, or twice, or its library can't be used."""


class RankError(LitOrtError):
    """A process of several could not join the others."""


class CheckpointError(LitOrtError):
    """A checkpoint can't be written or read."""


class ExportError(LitOrtError, ValueError):
    """A module can't be written as an ONNX model, or the model's results are not the module's."""


class NonFiniteError(LitOrtError):
    """A training loss is NaN or infinite."""


class VerificationError(LitOrtError):
    """The first step through ONNX Runtime disagrees with eager."""


class CompileError(LitOrtError):
    """A graph can't become a session. Falls back to eager under `fallback="warn"`.

    Args:
        problem: the offending value and the rule it breaks.
        remedy: what the user can do about it.
        operator: the FX or ONNX operator at fault, where one is known.
        module: the source line or module path that the operator came from, where one is known.
    """

    def __init__(self, problem: str, *, remedy: str, operator: str | None = None, module: str | None = None) -> None:
        self.problem = problem
        self.remedy = remedy
        self.operator = operator
        self.module = module
        where = "".join(f" [{label} {value}]" for label, value in (("operator", operator), ("at", module)) if value)
        super().__init__(f"{problem}{where}. {remedy}")


class CaptureError(CompileError):
    """Dynamo's FX graph has something that can't be traced into one graph of forward and backward."""


class ConvertError(CompileError):
    """An operator of the joint graph can be neither an ONNX operator nor a torch node."""


class SharedMemoryError(CompileError):
    """An input that a graph changes in place shares its memory with another input."""


class SessionError(CompileError):
    """ONNX Runtime refuses the model, or a run of it failed."""


class LitOrtWarning(UserWarning):
    """Something runs in another way than asked for; the text says what, why and what to do."""


def first_line_of(error: BaseException) -> str:
    """The first line of an error's message that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def warn_at(place: str | None, message: str) -> None:
    """Warns with LitOrtWarning.

    Args:
        place: `file:line` of the user's code that the warning is about, or None.
        message: of the warning.
    """
    if place is None:
        warnings.warn(message, LitOrtWarning, stacklevel=3)
    else:
        file, _, line = place.rpartition(":")
        warnings.warn_explicit(message, LitOrtWarning, file, int(line))
