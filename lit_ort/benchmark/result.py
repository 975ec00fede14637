"""What a benchmark returns, as a table and as plain data."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

EAGER, INDUCTOR, ORT = "eager", "inductor", "ort"
BASELINES = (EAGER, INDUCTOR, ORT)


@dataclasses.dataclass(frozen=True)
class BaselineFigures:
    """One way to run a step.

    Args:
        step_ms: milliseconds of each timed step.
        first_step_s: seconds of the first step, compiling included.
        cached_first_step_s: the same with the graph read from `cache_dir`; None for others than `ort`.
        peak_mb: the most memory of the first steps above what the process held with the module, in MB, compiling and
            the optimizer's state included; None where the system does not tell.
        gradient_error: the largest relative error of the loss or a gradient against eager, with dropout off; None for
            eager, and for a step that draws random numbers of its own.
        ran: what `explain` says in short; empty for others than `ort`.
        fallbacks: the reasons for which graphs ran in eager.
    """

    step_ms: tuple[float, ...]
    first_step_s: float
    cached_first_step_s: float | None = None
    peak_mb: float | None = None
    gradient_error: float | None = None
    ran: str = ""
    fallbacks: tuple[str, ...] = ()

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What `lit_ort.benchmark` returns, readable when printed.

    Args:
        step: what was timed.
        machine: processor, cores and threads.
        versions: of the packages that decide.
        figures: by baseline.
        notes: what could not be measured, and why.
    """

    step: str
    machine: str
    versions: dict[str, str]
    figures: dict[str, BaselineFigures]
    notes: tuple[str, ...] = ()

    def ratio(self, baseline: str, to: str) -> float | None:
        """The median time of a step as a part of another baseline's; None where one of them was not measured."""
        if baseline not in self.figures or to not in self.figures:
            return None
        return self.figures[baseline].median_ms / self.figures[to].median_ms

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        head = "| | ms a step | to eager | to inductor | first step, s | from the cache, s | peak, MB | largest error |"
        lines = [f"{self.step}; {self.machine}; {versions}", "", head, "|---|---|---|---|---|---|---|---|"]
        lines += [f"| {' | '.join(self._row(name))} |" for name in self.figures]
        ran = [f"{name}: {line}" for name, own in self.figures.items() for line in own.ran.splitlines()]
        return "\n".join([*lines, "", *ran, *self.notes])

    def _row(self, name: str) -> list[str]:
        own = self.figures[name]
        ratios = [None if to == name else self.ratio(name, to) for to in (EAGER, INDUCTOR)]
        error = "" if own.gradient_error is None else f"{own.gradient_error:.1e}"
        return [
            name,
            f"{own.median_ms:.1f}",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            f"{own.first_step_s:.1f}",
            "" if own.cached_first_step_s is None else f"{own.cached_first_step_s:.1f}",
            "" if own.peak_mb is None else f"{own.peak_mb:.0f}",
            error,
        ]
