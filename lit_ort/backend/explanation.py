"""What was compiled and what was not: graphs, operator counts, passes, fallbacks, graph breaks, recompiles, seconds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from lit_ort._compat.dynamo_events import trace_again
from lit_ort.backend.compile_timer import CompileWatch
from lit_ort.backend.page import page
from lit_ort.runtime.clock import Clock
from lit_ort.runtime.report import Choice, EagerFunction, GraphBreak, GraphReport, Recompile


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `explain`, readable when printed and in a notebook.

    Args:
        graphs: the report of each graph, in the order that they were compiled.
        clock: where the time of their runs went.
        breaks: the statements at which graphs end.
        eager_functions: the functions without a graph.
        recompiles: the functions that were compiled again.
        choices: how steps run, eager or compiled, and why; empty with `compile="always"`.
    """

    graphs: tuple[GraphReport, ...]
    clock: Clock = dataclasses.field(default_factory=Clock)
    breaks: tuple[GraphBreak, ...] = ()
    eager_functions: tuple[EagerFunction, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def fallbacks(self) -> tuple[GraphReport, ...]:
        """The graphs that run in eager PyTorch."""
        return tuple(graph for graph in self.graphs if graph.fallback is not None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was compiled, or could not be."""
        return not (self.graphs or self.eager_functions or self.breaks)

    @property
    def is_partly_eager(self) -> bool:
        """Whether code of a step runs in eager PyTorch, between graphs or in place of one."""
        return bool(self.fallbacks or self.eager_functions or self.breaks)

    @property
    def counts(self) -> str:
        """Graphs by kind, fallbacks and graph breaks, in a line."""
        kinds = collections.Counter(graph.kind for graph in self.graphs)
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        parts = [f"{_count(len(self.graphs), 'graph')} ({listed})" if self.graphs else "no graph"]
        if self.fallbacks:
            some = "" if len(self.fallbacks) == len(self.graphs) else f"{len(self.fallbacks)} of them "
            parts.append(f"{some}in eager PyTorch")
        if self.eager_functions:
            parts.append(f"{_count(len(self.eager_functions), 'function')} in eager PyTorch")
        if self.graphs and not self.fallbacks and not self.eager_functions:
            parts.append("no fallback")
        by_design = sum(graph_break.by_design for graph_break in self.breaks)
        parts.append(_count(len(self.breaks) - by_design, "graph break"))
        return ", ".join([*parts, f"{by_design} by design"] if by_design else parts)

    @property
    def times(self) -> str:
        """Where the time of runs went, in a line."""
        shares = self.clock.shares
        if shares is None:
            return "no run yet"
        return "time of runs: " + ", ".join(f"{share:.0%} {part}" for part, share in shares.items())

    @property
    def summary(self) -> str:
        """Two lines: graphs, fallbacks and graph breaks, and where the time of runs went."""
        if self.is_empty:
            return f"lit_ort: nothing compiled{'' if self.choices else ' yet. Graphs are compiled at their first run'}."
        return f"lit_ort: {self.counts}\n{self.times}"

    @property
    def advice(self) -> tuple[str, ...]:
        """One line for each choice, fallback, graph break, recompile and graph with fixed sizes.

        But none for a graph for any size, which replaces that of the first batch.
        """
        reasons = collections.Counter(graph.fallback for graph in self.fallbacks)
        recompiles = (recompile for recompile in self.recompiles if not recompile.is_for_any_size)
        sizes = {graph.fixed_sizes: graph.name for graph in reversed(self.graphs) if graph.fixed_sizes is not None}
        return (
            *map(str, self.choices),
            *(f"fallback{'' if count == 1 else f', {count} times'}: {reason}" for reason, count in reasons.items()),
            *map(str, (*self.eager_functions, *self.breaks, *recompiles)),
            *(f"{name} is compiled for each size separately: {reason}" for reason, name in sizes.items()),
        )

    def details(self) -> str:
        """The whole report, with everything known of each graph: inputs, memory, operators, passes."""
        return "\n".join(map(str, (self, *self.graphs)))

    def __str__(self) -> str:
        return "\n".join([self.summary, *self.advice])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return page(self.summary, self.advice, self.graphs)


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number < 2 else 's'}"


# Traits of a step's code.
_UNTRACED, _IN_PARTS, _READS_GRADIENTS = "untraced", "in_parts", "reads_gradients"


@dataclasses.dataclass(frozen=True)
class Records:
    """What a log knows of compiled code. Functions that run in eager are traced again for another log."""

    graphs: tuple[GraphReport, ...]
    breaks: tuple[GraphBreak, ...]
    recompiles: dict[tuple[str, str], Recompile]
    traits: frozenset[tuple[str, str | None]]


class CompileLog:
    """Reports of the graphs that one backend compiled.

    Attributes:
        graphs: the reports.
        breaks, eager_functions: the graph breaks and the functions that run in eager.
        choices: returns, for each step that isn't always compiled, how it runs.
        clock: the time of the graphs' runs.
        watch: the time of their compilation; its listener receives a line for each graph break and recompile.
    """

    def __init__(self) -> None:
        self.graphs: list[GraphReport] = []
        self.breaks: list[GraphBreak] = []
        self.eager_functions: list[EagerFunction] = []
        self.choices: dict[str, Callable[[], Choice]] = {}
        self.clock = Clock()
        self.watch = CompileWatch()
        self._recompiles: dict[tuple[str, str], Recompile] = {}
        self._reasons: set[str] = set()
        # What is known of the code of steps, by their names.
        self._traits: set[tuple[str, str | None]] = set()
        _LOGS[id(self)] = self
        trace_again()

    # The watch belongs to this process: it has a thread. So do the steps about which choices are made.

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "watch"}
        return {**state, "choices": {step: partial(_same, choice()) for step, choice in self.choices.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.watch = CompileWatch()

    def records(self) -> Records:
        """What it knows of compiled code."""
        return Records(tuple(self.graphs), tuple(self.breaks), dict(self._recompiles), frozenset(self._traits))

    def adopt(self, records: Records) -> None:
        """Adds what another log knows of code that is used again."""
        known = {report.name for report in self.graphs}
        reused = (dataclasses.replace(report, is_reused=True) for report in records.graphs)
        self.graphs.extend(report for report in reused if report.name not in known)
        self.breaks.extend(one for one in records.breaks if self.is_new(_at(one)))
        self._recompiles = {**records.recompiles, **self._recompiles}
        self._traits |= records.traits

    @property
    def recompiles(self) -> tuple[Recompile, ...]:
        """One for each function and place, with the latest reason."""
        return tuple(self._recompiles.values())

    def note_gradient_read(self, step: str | None) -> None:
        """Records that code of a step reads the `grad` of a tensor."""
        self._traits.add((_READS_GRADIENTS, step))

    def note_untraced(self, step: str | None) -> None:
        """Records that Dynamo doesn't trace a part of a step's code."""
        self._traits.add((_UNTRACED, step))

    def note_parts(self, step: str | None) -> None:
        """Records that a step is several graphs, of which the later ones can be traced anew after the first has run."""
        self._traits.add((_IN_PARTS, step))

    def runs_outside_of_graphs(self, step: str) -> bool:
        """Whether code of a step, as far as it has run, runs between graphs or is not traced."""
        return not self._traits.isdisjoint({(_IN_PARTS, step), (_UNTRACED, step)})

    def reads_gradients(self, step: str) -> bool:
        """Whether code of a step, as far as it was traced, reads the `grad` of a tensor."""
        return (_READS_GRADIENTS, step) in self._traits

    def may_read_gradients(self, step: str) -> bool:
        """Whether code of a step reads the `grad` of a tensor, or may do so where it is not traced, or not yet."""
        return self.reads_gradients(step) or self.runs_outside_of_graphs(step)

    def is_new(self, reason: str) -> bool:
        """Whether a reason is reported for the first time."""
        known = reason in self._reasons
        self._reasons.add(reason)
        return not known

    def note_break(self, graph_break: GraphBreak) -> None:
        """Records a graph break, once for each place."""
        if self.is_new(_at(graph_break)):
            self.breaks.append(graph_break)
            if not graph_break.by_design:
                self.watch.listener.note(str(graph_break))

    def note_eager_function(self, function: EagerFunction) -> bool:
        """Records a function that runs in eager, the first of a step for each reason. Returns whether it is new.

        The rest of a function is reported in a line, as a graph break is.
        """
        is_new = self.is_new(f"{function.step} in eager: {function.reason}")
        if is_new:
            self.eager_functions.append(function)
            if function.is_rest:
                self.watch.listener.note(str(function))
        return is_new

    def note_recompile(self, recompile: Recompile) -> None:
        """Records a recompile; the first one of a function at a place is reported."""
        key = (recompile.name, recompile.place)
        before = self._recompiles.get(key)
        if before is None:
            self.watch.listener.note(str(recompile))
        else:
            recompile = dataclasses.replace(recompile, count=before.count + 1)
        self._recompiles[key] = recompile

    def note_verification(self, graph: str, worst: tuple[str, ...]) -> None:
        """Counts a comparison with eager in a graph's report."""
        for k, report in enumerate(self.graphs):
            if report.name == graph:
                self.graphs[k] = dataclasses.replace(report, verified=report.verified + 1, worst=worst)

    def explanation(self) -> Explanation:
        """Everything recorded so far."""
        return Explanation(
            tuple(self.graphs),
            self.clock,
            tuple(self.breaks),
            tuple(self.eager_functions),
            self.recompiles,
            tuple(choice() for choice in self.choices.values()),
        )


def _at(graph_break: GraphBreak) -> str:
    return f"graph break at {graph_break.place}"


def _same(choice: Choice) -> Choice:
    return choice


# All logs of the process in the order of their creation, as Dynamo's cache of compiled code belongs to the process.
_LOGS: WeakValueDictionary[int, CompileLog] = WeakValueDictionary()


def explain(source: Any = None) -> Explanation:
    """What ran where, and why not.

    Args:
        source: a Trainer whose strategy is one of lit_ort's, that strategy, an `ORTBackend`, or None for everything
            that this process compiled.

    Raises:
        TypeError: the strategy of `source` is not one of lit_ort's.
    """
    if source is None:
        return _joined([log.explanation() for log in _LOGS.values()])
    strategy = getattr(source, "strategy", source)
    log = getattr(strategy, "compile_log", None)
    if not isinstance(log, CompileLog):
        kind = type(strategy).__name__
        found = "it is no Trainer" if strategy is source else f"its strategy, {kind}, is not lit_ort's"
        raise TypeError(
            f"explain({type(source).__name__}) has nothing to show: {found}. Pass a Trainer(strategy='ort'), or "
            "nothing for all that this process compiled, torch.compile's functions among it."
        )
    return log.explanation()


def _joined(parts: Sequence[Explanation]) -> Explanation:
    """One explanation for several logs, their times added up."""
    clocks = [dataclasses.astuple(part.clock) for part in parts]
    joined: dict[str, Any] = {
        name: tuple(item for part in parts for item in getattr(part, name))
        for name in ("breaks", "eager_functions", "recompiles", "choices")
    }
    # What several fits use counts once.
    joined |= {name: tuple(dict.fromkeys(joined[name])) for name in ("breaks", "eager_functions", "recompiles")}
    joined["graphs"] = tuple(graph for part in parts for graph in part.graphs if not graph.is_reused)
    return Explanation(clock=Clock(*map(sum, zip(*clocks, strict=True))) if clocks else Clock(), **joined)
