"""The hierarchy of errors. Every message names the offending value, the rule and the remedy."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

# In the reason of a graph or function that runs in eager because of an error in this package.
DEFECT = "a defect of lit_ort"
_PACKAGE = Path(__file__).parent


class LitOrtError(Exception):
    """Base class of all errors of lit_ort."""


class OptionsError(LitOrtError, ValueError):
    """An option has an unknown name or an invalid value."""


class UnsupportedError(LitOrtError, ValueError):
    """A setting of Lightning that the strategy does not support."""


class EngineError(LitOrtError):
    """ONNX Runtime is not installed, is installed twice, or its library can't be used."""


class KernelError(LitOrtError):
    """Machine code can't be made for the CPU of this machine."""


class RankError(LitOrtError):
    """A process could not join the others."""


class CheckpointError(LitOrtError):
    """A checkpoint can't be written or read."""


class ExportError(LitOrtError, ValueError):
    """A module can't be exported as an ONNX model, or the model's results differ from the module's."""


class NonFiniteError(LitOrtError):
    """A training loss is NaN or infinite."""


class VerificationError(LitOrtError):
    """A run through ONNX Runtime disagrees with eager."""


class CompileError(LitOrtError):
    """A graph can't be compiled to a session. Under `fallback="warn"` it runs in eager.

    Args:
        problem: the offending value and the rule.
        remedy: what the user can change.
        operator: the FX or ONNX operator at fault, if known.
        module: the source line or the module path of the operator, if known.
    """

    def __init__(self, problem: str, *, remedy: str, operator: str | None = None, module: str | None = None) -> None:
        self.problem = problem
        self.remedy = remedy
        self.operator = operator
        self.module = module
        where = "".join(f" [{label} {value}]" for label, value in (("operator", operator), ("at", module)) if value)
        super().__init__(f"{problem}{where}. {remedy}")


class CaptureError(CompileError):
    """Dynamo's FX graph can't be traced into one graph of forward and backward."""


class ConvertError(CompileError):
    """An operator of the joint graph can be neither an ONNX operator nor a torch node."""


class SharedMemoryError(CompileError):
    """An input that a graph changes in place shares its memory with another input."""


class SessionError(CompileError):
    """ONNX Runtime rejected the model, or a run of it failed."""


class LitOrtWarning(UserWarning):
    """Something runs differently from what was requested; the message has the reason and the remedy."""


def first_line_of(error: BaseException) -> str:
    """The first line of an error's message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def place_in_package(error: BaseException) -> str | None:
    """The file and line of this package that raised an error; None for an error of other code."""
    frames = traceback.extract_tb(error.__traceback__)
    path = Path(frames[-1].filename) if frames else Path()
    return f"{path.relative_to(_PACKAGE)}:{frames[-1].lineno}" if path.is_relative_to(_PACKAGE) else None


def warn_at(place: str | None, message: str) -> None:
    """Warns with LitOrtWarning.

    Args:
        place: `file:line` of the user's code that the warning is about, or None.
        message: the warning's text.
    """
    if place is None:
        warnings.warn(message, LitOrtWarning, stacklevel=3)
    else:
        file, _, line = place.rpartition(":")
        warnings.warn_explicit(message, LitOrtWarning, file, int(line))
