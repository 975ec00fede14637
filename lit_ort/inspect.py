"""What was compiled: graphs, operator counts, passes, fallbacks, seconds."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import onnx_ir as ir


@dataclasses.dataclass(frozen=True)
class PassReport:
    """Outcome of one pass on one model.

    Args:
        name: the pass.
        fired: how many places it rewrote.
        declined: places that have its shape but break its rule, each with the reason.
    """

    name: str
    fired: int
    declined: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """One graph at one signature.

    Args:
        name: what was compiled, such as `training_step`.
        kind: `fused`, `split`, `forward` or `eager`.
        inputs: number of tensor inputs.
        wants_gradient: number of inputs that get gradients.
        shapes: name, dtype and shape of the inputs that are not parameters or buffers.
        operators_before: operator counts as translated, forward only.
        operators_after: operator counts of what runs.
        passes: report of every pass, in order.
        seconds: time from graph to session.
        fallback: why the graph runs in eager, or None.
        cache: with a `cache_dir`, whether the graph was `read` from it, was `written`, or was not kept and why.
        precision: what its nodes compute in.
        peak_bytes: the most that values of one run hold at a time beside its inputs, gradients included, as planned.
        torch_operators: counts of the operators that run as torch's own, with autograd's gradients, each as one node.
        verified: how many of its runs were compared with eager.
        worst: the largest relative errors of the last comparison, as `gradient of head.weight 2.1e-07`.
        fixed_sizes: why the graph is compiled for these sizes only, where Dynamo left some open.
    """

    name: str
    kind: str
    inputs: int
    wants_gradient: int
    shapes: tuple[str, ...]
    operators_before: dict[str, int]
    operators_after: dict[str, int]
    passes: tuple[PassReport, ...]
    seconds: float
    fallback: str | None = None
    cache: str | None = None
    precision: str = "32-true"
    peak_bytes: int = 0
    torch_operators: dict[str, int] = dataclasses.field(default_factory=dict)
    fixed_sizes: str | None = None
    verified: int = 0
    worst: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = f"{self.inputs} inputs, {self.wants_gradient} gradients"
        head = f"{self.name}: {self.kind}, {counts}, {self.precision}, {self.seconds:.1f} s"
        lines = [head, f"  data     {', '.join(self.shapes) or 'none'}"]
        if self.fallback is not None:
            return "\n".join([*lines, f"  fallback {self.fallback}"])
        if self.cache is not None:
            lines.append(f"  cache    {self.cache}")
        if self.verified:
            lines.append(f"  verified {self.verified} times; errors at most {', '.join(self.worst)}")
        if self.fixed_sizes is not None:
            lines.append(f"  sizes    these only: {self.fixed_sizes}")
        lines.append(f"  memory   {self.peak_bytes / 1e6:.0f} MB at most, inputs aside, as planned")
        lines.append(f"  forward  {_counts(self.operators_before)}")
        lines.append(f"  runs     {_counts(self.operators_after)}")
        if self.torch_operators:
            lines.append(f"  by torch {_counts(self.torch_operators)}")
        for report in self.passes:
            lines.append(f"  pass     {report.name}: {report.fired} rewritten, {len(report.declined)} declined")
            lines.extend(f"             {reason}" for reason in report.declined[:MOST_REASONS])
            if len(report.declined) > MOST_REASONS:
                lines.append(f"             and {len(report.declined) - MOST_REASONS} more")
        return "\n".join(lines)


MOST_REASONS = 4


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


def count_operators(model: ir.Model) -> dict[str, int]:
    """Operator counts, the most frequent first."""
    return dict(collections.Counter(node.op_type for node in model.graph).most_common())


def dump(model: ir.Model, folder: str | os.PathLike[str] | None, graph: str, stage: str) -> None:
    """Writes a stage's ONNX file to `folder/graph/stage.onnx`; without a folder, nothing."""
    if folder is not None:
        path = Path(folder) / graph / f"{stage}.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        ir.save(model, path)


def _counts(operators: dict[str, int] | Iterable[tuple[str, int]]) -> str:
    return " ".join(f"{name} {count}" for name, count in dict(operators).items())
