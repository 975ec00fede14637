"""What building a graph gives and the cache keeps, and what is raised where there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from lit_ort.errors import CompileError, first_line_of
from lit_ort.runtime.program import Program
from lit_ort.runtime.report import GraphReport


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A program and the report of how it was made."""

    program: Program
    report: GraphReport


@contextmanager
def others_as_compile_errors() -> Iterator[None]:
    """Raises a CompileError, with the original as its cause, for whatever tracing and lowering raise.

    It means one thing here: this graph can't be compiled, and eager can run it.
    """
    try:
        yield
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(
            f"the graph can't be compiled: {type(error).__name__}: {first_line_of(error)}",
            remedy="It runs in eager under fallback='warn'; TORCH_LOGS=+aot shows torch's own trace.",
        ) from error
