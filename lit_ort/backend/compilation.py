"""The result of building a graph, which the cache keeps, and the errors of building."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from lit_ort.errors import CompileError, first_line_of
from lit_ort.runtime.program import Program
from lit_ort.runtime.report import GraphReport


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
    except Exception as error:
        raise CompileError(
            f"the graph can't be compiled: {type(error).__name__}: {first_line_of(error)}",
            remedy="It runs in eager under fallback='warn'; TORCH_LOGS=+aot shows torch's own trace.",
        ) from error
