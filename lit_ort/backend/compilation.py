"""The result of building a graph, which the cache keeps, and the errors of building."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_ort._compat.torch_fx import DataDependentOutputException
from lit_ort.errors import CaptureError, CompileError, first_line_of
from lit_ort.runtime.program import Program
from lit_ort.runtime.report import GraphReport

# In the reason of a graph that runs in eager because of an error in this package.
DEFECT = "a defect of lit_ort"
_OF_MISTAKES = (AssertionError, AttributeError, LookupError, NameError, StopIteration, TypeError)
_PACKAGE = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A program and the report on its compilation."""

    program: Program
    report: GraphReport


@contextmanager
def others_as_compile_errors() -> Iterator[None]:
    """Turns any exception of tracing and lowering into a CompileError, with the original as its cause.

    In this block every exception means the same: the graph can't be compiled, and eager can run it.
    """
    try:
        yield
    except CompileError:
        raise
    except DataDependentOutputException as error:
        raise CaptureError(
            f"the graph needs the value of a tensor, or of an array, as a number ({error.func})",
            remedy="Use a Python number, or read the value outside of the step.",
        ) from error
    except Exception as error:
        place = _place_of_defect(error)
        if place is not None:
            raise CompileError(
                f"the graph can't be compiled because of {DEFECT}: {type(error).__name__}: {first_line_of(error)}, at "
                f"{place}",
                remedy="Please report it. The graph runs in eager under fallback='warn'.",
            ) from error
        raise CompileError(
            f"the graph can't be compiled: {type(error).__name__}: {first_line_of(error)}",
            remedy="It runs in eager under fallback='warn'; TORCH_LOGS=+aot shows torch's own trace.",
        ) from error


def _place_of_defect(error: Exception) -> str | None:
    """Where code of this package raised an error that only a mistake in it raises; None for other errors."""
    if not isinstance(error, _OF_MISTAKES):
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(frame.filename)
    return f"{path.relative_to(_PACKAGE)}:{frame.lineno}" if path.is_relative_to(_PACKAGE) else None
