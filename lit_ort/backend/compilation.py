"""The result of building a graph, which the cache keeps, and the errors of building."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from lit_ort._compat.torch_fx import DataDependentOutputException
from lit_ort.errors import DEFECT, CaptureError, CompileError, first_line_of, place_in_package
from lit_ort.runtime.program import Program
from lit_ort.runtime.report import GraphReport

_OF_MISTAKES = (AssertionError, AttributeError, LookupError, NameError, StopIteration, TypeError, ZeroDivisionError)


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
        place = place_in_package(error) if isinstance(error, _OF_MISTAKES) else None
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
