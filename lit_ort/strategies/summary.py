"""The lines at the end of a fit: time per batch, memory, what ran where."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

from lit_ort._compat.lightning import own_class_of, package_of
from lit_ort.backend.explanation import CompileLog, Explanation
from lit_ort.callbacks import MIB, StepStatistics, peak_rss_bytes, rss_bytes
from lit_ort.strategies.compile_progress import above_bars

# Batches behind the median: those at the end of a long fit.
WINDOW = 10_000


class FitSummary:
    """Measures one fit, from its creation on.

    Args:
        compile_log: the strategy's compile log.
    """

    def __init__(self, compile_log: CompileLog) -> None:
        self._compile_log = compile_log
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._rss, self._peak_before = rss_bytes(), peak_rss_bytes()

    def add(self, start: float) -> None:
        """Records the time of a batch that has just ended.

        Args:
            start: when it began, by `time.perf_counter`, in seconds.
        """
        self._seconds.append(perf_counter() - start)

    def lines(self, callbacks: Sequence[Any]) -> list[str]:
        """The lines of the summary. There are none if no training batch ran.

        Args:
            callbacks: the Trainer's callbacks. If StepStatistics is one of them, which reports time and memory itself,
                there is only a line about fallbacks and graph breaks, if there are any.
        """
        explanation = self._compile_log.explanation()
        if not self._seconds:
            return []
        # The training step's first.
        parts = [str(choice) for choice in sorted(explanation.choices, key=lambda choice: choice.step)]
        choices = ["; ".join(parts)] if parts else []
        if explanation.is_empty:
            return choices
        graphs = self._graphs(explanation)
        if any(isinstance(callback, StepStatistics) for callback in callbacks):
            return [*choices, graphs] if explanation.is_partly_eager else choices
        costs = self.costs()
        return [*choices, *([costs] if costs else []), graphs, explanation.times]

    def log(self, trainer: Any) -> None:
        """Adds how each step ran to the hyperparameters of Lightning's loggers, and to TensorBoard's texts."""
        choices = self._compile_log.explanation().choices
        values = {name: value for choice in choices for name, value in choice.hyperparameters.items()}
        for logger in trainer.loggers if values else ():
            kind = own_class_of(logger).__name__
            # TensorBoard takes the hyperparameters of the start only; MLflow refuses to change them in a second fit.
            if kind == "TensorBoardLogger":
                logger.experiment.add_text("lit_ort", "\n\n".join(map(str, choices)), trainer.global_step)
            elif kind in ("CSVLogger", "WandbLogger"):
                logger.log_hyperparams(values)

    def _graphs(self, explanation: Explanation) -> str:
        seconds = sum(graph.seconds for graph in explanation.graphs if not graph.is_reused)
        reused = sum(graph.is_reused for graph in explanation.graphs)
        earlier = f", {reused} of them in an earlier fit" if reused else ""
        more = "; lit_ort.explain(trainer) shows where and why" if explanation.is_partly_eager else ""
        return f"{explanation.counts}, compiled in {seconds:.1f} s{earlier}{more}"

    def costs(self) -> str:
        """Time per batch and peak memory; empty if neither is known."""
        parts = []
        # The time of the first batch includes the compilation.
        if timed := list(self._seconds)[1:]:
            parts.append(f"{median(timed) * 1e3:.1f} ms per batch (median of {len(timed)})")
        peak = peak_rss_bytes()
        if peak is not None and self._peak_before is not None:
            # The system has one peak for the whole life of the process.
            bound = "" if peak > self._peak_before else "at most "
            parts.append(f"peak memory {bound}{max(0, peak - self._rss) / MIB:.0f} MiB above the start")
        return ", ".join(parts)


def show(trainer: Any, lines: Sequence[str]) -> None:
    """Logs lines as Lightning does, on rank zero.

    Args:
        trainer: of either of Lightning's packages.
    """
    rank_zero = importlib.import_module(f"{package_of(trainer)}.utilities.rank_zero")
    with above_bars(trainer):
        for line in lines:
            rank_zero.rank_zero_info(f"lit_ort: {line}")
