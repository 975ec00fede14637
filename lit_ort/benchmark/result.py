"""The result of a benchmark, as a table and as plain data."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

EAGER, INDUCTOR, ORT = "eager", "inductor", "ort"
BASELINES = (EAGER, INDUCTOR, ORT)


@dataclasses.dataclass(frozen=True)
class BaselineFigures:
    """The measurements of one baseline.

    Args:
        step_ms: the time of each timed step, in milliseconds.
        first_step_s: the time of the first step with compilation, in seconds.
        cached_first_step_s: the same with the graph read from `cache_dir`; None for baselines other than `ort`.
        peak_mb: the peak memory of the first steps above the memory of the process with the module, in MB; includes
            compilation and the optimizer's state. None if the system doesn't report it.
        gradient_error: the largest relative error of the loss or a gradient compared with eager, without dropout; None
            for eager, and for inductor with a step that draws random numbers besides dropout.
        ran: the summary of `explain`; empty for baselines other than `ort`.
        fallbacks: the reasons why graphs or functions ran in eager.
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


@dataclasses.dataclass(frozen=True, repr=False)
class Benchmark:
    """The result of `lit_ort.benchmark`; prints as a table, also in a notebook.

    Args:
        step: a description of the step.
        machine: processor, cores and threads.
        versions: the versions of the packages that affect measurements.
        figures: the measurements by baseline.
        notes: what could not be measured, and why; and whether other programs used the cores.
    """

    step: str
    machine: str
    versions: dict[str, str]
    figures: dict[str, BaselineFigures]
    notes: tuple[str, ...] = ()

    def ratio(self, baseline: str, to: str) -> float | None:
        """The median step time of `baseline` divided by that of `to`; None if one of them was not measured."""
        if baseline not in self.figures or to not in self.figures:
            return None
        return self.figures[baseline].median_ms / self.figures[to].median_ms

    def as_dict(self) -> dict[str, Any]:
        """All fields as a dictionary that can be written as JSON; an error that is not finite is "inf"."""
        fields = dataclasses.asdict(self)
        for figures in fields["figures"].values():
            error = figures["gradient_error"]
            figures["gradient_error"] = error if error is None or math.isfinite(error) else str(error)
        return fields

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        head = (
            "| | ms/step | relative to eager | relative to inductor | first step, s | first step from cache, s | "
            "peak, MB | largest error |"
        )
        lines = [f"{self.step}; {self.machine}; {versions}", "", head, "|---|---|---|---|---|---|---|---|"]
        lines += [f"| {' | '.join(self._row(name))} |" for name in self.figures]
        summaries = [
            f"{name}: {line.removeprefix('lit_ort: ')}"
            for name, figures in self.figures.items()
            for line in (*figures.ran.splitlines(), *figures.fallbacks)
        ]
        # Two spaces at the end of a line break it in Markdown.
        return "\n".join([*lines, "", "  \n".join([*summaries, *self.notes])])

    __repr__ = _repr_markdown_ = __str__

    def _row(self, name: str) -> list[str]:
        figures = self.figures[name]
        ratios = [None if to == name else self.ratio(name, to) for to in (EAGER, INDUCTOR)]
        error = "" if figures.gradient_error is None else f"{figures.gradient_error:.1e}"
        return [
            name,
            f"{figures.median_ms:.1f}",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            f"{figures.first_step_s:.1f}",
            "" if figures.cached_first_step_s is None else f"{figures.cached_first_step_s:.1f}",
            "" if figures.peak_mb is None else f"{figures.peak_mb:.0f}",
            error,
        ]
