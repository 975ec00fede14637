"""The outcome of one strategy's run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Column:
    """A figure of a run.

    Args:
        title: in the table.
        section: of results.json.
        key: in that section.
        form: the format specification of the value.
    """

    title: str
    section: str
    key: str
    form: str


STEP_TIME = Column("ms/batch", "steps", "step_ms_median", ".1f")
ADDED_MEMORY = Column("added MiB", "steps", "peak_above_start_mib", ".0f")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one strategy's run.

    Args:
        strategy: its name.
        log: the output of the run.
        results: the content of results.json; None where the run failed.
        failure: the exit code and the last error of a run that failed.
    """

    strategy: str
    log: Path
    results: dict[str, Any] | None
    failure: str | None

    def value(self, column: Column) -> float | None:
        if self.results is None:
            return None
        section = self.results[column.section] or {}
        return section.get(column.key)
