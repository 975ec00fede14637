"""What was compiled: graphs, operator counts, passes, fallbacks, seconds."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any
from weakref import WeakSet

from lit_ort.backend.watch import CompileWatch
from lit_ort.runtime.clock import Clock
from lit_ort.runtime.report import GraphReport


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns: the reports, readable when printed.

    Args:
        graphs: the report of each, in the order that they were compiled.
        clock: where the time of their runs went.
    """

    graphs: tuple[GraphReport, ...]
    clock: Clock = dataclasses.field(default_factory=Clock)

    @property
    def fallbacks(self) -> tuple[GraphReport, ...]:
        """The graphs that run in eager PyTorch."""
        return tuple(graph for graph in self.graphs if graph.fallback is not None)

    @property
    def summary(self) -> str:
        """Two lines: graphs and fallbacks, and where the time of their runs went."""
        if not self.graphs:
            return "lit_ort: nothing compiled yet. Graphs are compiled at their first run."
        kinds = collections.Counter(graph.kind for graph in self.graphs)
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        fallbacks = f"{len(self.fallbacks)} of them in eager PyTorch" if self.fallbacks else "no fallback"
        first = f"lit_ort: {len(self.graphs)} graphs ({counts}), {fallbacks}"
        shares = self.clock.shares
        if shares is None:
            return f"{first}\nno run yet"
        return f"{first}\ntime of runs: " + ", ".join(f"{share:.0%} {part}" for part, share in shares.items())

    def details(self) -> str:
        """Everything known of each graph: inputs, memory, operators, passes."""
        return "\n".join(map(str, self.graphs))

    def __str__(self) -> str:
        merged = collections.Counter(graph.fallback for graph in self.fallbacks)
        fallbacks = [f"fallback, {count} times: {reason}" for reason, count in merged.items()]
        return "\n".join([self.summary, *fallbacks, *(graph.head for graph in self.graphs)])


class CompileLog:
    """Reports of the graphs that one backend compiled.

    Attributes:
        graphs: the reports.
        clock: the time of their runs.
        watch: the time of their compilation.
    """

    def __init__(self) -> None:
        self.graphs: list[GraphReport] = []
        self.clock = Clock()
        self.watch = CompileWatch()
        self._reasons: set[str] = set()
        _LOGS.add(self)

    # The watch is of this process: it has a thread.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "watch"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.watch = CompileWatch()

    def is_new(self, reason: str) -> bool:
        """Whether a reason for a fallback is given for the first time."""
        known = reason in self._reasons
        self._reasons.add(reason)
        return not known

    def note_verification(self, graph: str, worst: tuple[str, ...]) -> None:
        """Counts a comparison with eager in a graph's report."""
        for k, report in enumerate(self.graphs):
            if report.name == graph:
                self.graphs[k] = dataclasses.replace(report, verified=report.verified + 1, worst=worst)


# Dynamo's own cache of compiled code belongs to the process, so what was compiled into it does too.
_LOGS: WeakSet[CompileLog] = WeakSet()


def explain(source: Any = None) -> Explanation:
    """What ran where, and why not.

    Args:
        source: a Trainer whose strategy is one of lit_ort's, that strategy, an `ORTBackend`, or None for everything
            that this process compiled.

    Raises:
        TypeError: `source` was not run by one of lit_ort's strategies.
    """
    if source is None:
        logs = list(_LOGS)
        parts = [dataclasses.astuple(log.clock) for log in logs]
        clock = Clock(*map(sum, zip(*parts, strict=True))) if parts else Clock()
        return Explanation(tuple(report for log in logs for report in log.graphs), clock)
    strategy = getattr(source, "strategy", source)
    log = getattr(strategy, "compile_log", None)
    if not isinstance(log, CompileLog):
        raise TypeError(
            f"explain({type(source).__name__}) has nothing to tell: its strategy is {type(strategy).__name__}, not one "
            "of lit_ort's. Pass a Trainer(strategy='ort'), or nothing for the whole process."
        )
    return Explanation(tuple(log.graphs), log.clock)
