"""What was compiled: graphs, operator counts, passes, fallbacks, seconds."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any
from weakref import WeakSet

from lit_ort.runtime.report import GraphReport


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns: the reports, readable when printed."""

    graphs: tuple[GraphReport, ...]

    @property
    def fallbacks(self) -> tuple[GraphReport, ...]:
        return tuple(graph for graph in self.graphs if graph.fallback is not None)

    def __str__(self) -> str:
        if not self.graphs:
            return "lit_ort: nothing compiled yet. Graphs are compiled at their first run."
        kinds = collections.Counter(graph.kind for graph in self.graphs)
        summary = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return "\n".join([f"lit_ort: {len(self.graphs)} graphs ({summary})", *map(str, self.graphs)])


class CompileLog:
    """Reports of the graphs that one backend compiled."""

    def __init__(self) -> None:
        self.graphs: list[GraphReport] = []
        _LOGS.add(self)

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
        return Explanation(tuple(report for log in _LOGS for report in log.graphs))
    strategy = getattr(source, "strategy", source)
    log = getattr(strategy, "compile_log", None)
    if not isinstance(log, CompileLog):
        raise TypeError(
            f"explain({type(source).__name__}) has nothing to tell: its strategy is {type(strategy).__name__}, not one "
            "of lit_ort's. Pass a Trainer(strategy='ort'), or nothing for the whole process."
        )
    return Explanation(tuple(log.graphs))
