"""report.png: the training loss, the time of a step and the memory of each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_ort_tasks.comparison.outcome import ADDED_MEMORY, STEP_TIME, Outcome


@dataclass(frozen=True)
class Curve:
    """A metric over a run: steps, seconds of training until then, values; of equal length.

    The seconds are those of as many steps of the median time, so that other load of the machine and validations during
    a run don't count.
    """

    steps: list[int]
    seconds: list[float]
    values: list[float]


def read_curve(outcome: Outcome, tag: str) -> Curve:
    """A metric from the TensorBoard events of a strategy, without those of earlier runs in its folder.

    Empty where the metric was never logged.
    """
    events = EventAccumulator(str(outcome.log.parent), size_guidance={"scalars": 0})
    events.Reload()
    if outcome.results is None or tag not in events.Tags()["scalars"]:
        return Curve([], [], [])
    scalars = events.Scalars(tag)
    steps = outcome.results["steps"] or {}
    start_s = steps.get("started_unix_s") or scalars[0].wall_time
    scalars = [scalar for scalar in scalars if scalar.wall_time >= start_s]
    seconds = (outcome.value(STEP_TIME) or 0.0) / 1e3
    # Steps are counted from zero.
    passed = [(scalar.step + 1) * seconds for scalar in scalars]
    return Curve([scalar.step for scalar in scalars], passed, [scalar.value for scalar in scalars])


def draw(folder: Path, outcomes: Sequence[Outcome]) -> Path:
    """Writes report.png: training loss by step and by time, time of a step, memory. Returns its path."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    by_step, by_time, step_time, memory = figure.subplots(2, 2).flat
    done = [(f"C{index}", outcome) for index, outcome in enumerate(outcomes) if outcome.results is not None]
    for color, outcome in done:
        curve = read_curve(outcome, "train/loss")
        by_step.plot(curve.steps, curve.values, color=color, label=outcome.strategy)
        by_time.plot(curve.seconds, curve.values, color=color, label=outcome.strategy)
    label_curves(by_step, "training loss by step", "step")
    label_curves(by_time, "training loss by time", "seconds of training steps, by their median time")
    names, colors = [outcome.strategy for _, outcome in done], [color for color, _ in done]
    times = [outcome.value(STEP_TIME) for _, outcome in done]
    draw_bars(step_time, "time of a training batch (median), ms", names, colors, times)
    added = [outcome.value(ADDED_MEMORY) for _, outcome in done]
    draw_bars(memory, "peak memory above the start of fit, MiB", names, colors, added)
    path = folder / "report.png"
    figure.savefig(path, dpi=120)
    return path


def label_curves(axes: Axes, title: str, x_label: str) -> None:
    axes.set(title=title, xlabel=x_label, ylabel="loss")
    axes.grid(alpha=0.3)
    if any(np.size(line.get_xdata()) for line in axes.get_lines()):
        axes.legend()
    else:
        note = "nothing logged: train for more steps,\nor lower trainer.log_every_n_steps"
        axes.text(0.5, 0.5, note, ha="center", va="center", transform=axes.transAxes)


def draw_bars(axes: Axes, title: str, names: list[str], colors: list[str], values: list[float | None]) -> None:
    bars = axes.barh(names, [value or 0.0 for value in values], color=colors)
    axes.bar_label(bars, ["unknown" if value is None else f"{value:.0f}" for value in values], padding=4)
    axes.set_title(title)
    axes.margins(x=0.12)
    axes.invert_yaxis()
