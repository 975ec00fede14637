"""What building a graph gives, and the cache keeps."""

from __future__ import annotations

import dataclasses

from lit_ort.runtime.program import Program
from lit_ort.runtime.report import GraphReport


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A program and the report of how it was made."""

    program: Program
    report: GraphReport
