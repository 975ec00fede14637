"""Trains the same model with several strategies and reports them side by side. `lit-ort compare --help` says more."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.console import Console
from rich.status import Status

from lit_ort_tasks.commands.program import command_line, configuration_folder
from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.runs import RESULTS

TRAIN = ("-m", "lit_ort_tasks.commands.train")
# Overrides that a comparison sets itself.
OWN_KEYS = {
    "strategy": "it runs each of strategies=[...]",
    "logger": "it reads TensorBoard's events",
    "ckpt_path": "every strategy starts from the seed",
}
PACKAGES = ("torch", "lightning", "onnxruntime-training-cpu", "onnxruntime-training", "onnx")


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, where its value is in results.json, how it is written."""

    title: str
    section: str
    key: str
    form: str


STEP_TIME = Column("ms/batch", "steps", "step_ms_median", ".1f")
ADDED_MEMORY = Column("added MiB", "steps", "peak_above_start_mib", ".0f")


@dataclass(frozen=True)
class Outcome:
    """What became of one strategy: its results.json, or None and the last line of its log."""

    strategy: str
    log: Path
    results: dict[str, Any] | None
    failure: str | None

    def value(self, column: Column) -> float | None:
        if self.results is None:
            return None
        section = self.results[column.section] or {}
        return section.get(column.key)


@dataclass(frozen=True)
class Curve:
    """A metric over a run: steps, seconds since fit began, values; of equal length."""

    steps: list[int]
    seconds: list[float]
    values: list[float]


def check(strategies: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuses strategies that do not exist, an empty or repeating list, and overrides that a comparison sets itself."""
    valid = ", ".join(GlobalHydra.instance().config_loader().get_group_options("strategy"))
    require(len(strategies) > 0, f"strategies=[]: at least one is needed. Choose from {valid}.")
    for name in strategies:
        require(name in valid.split(", "), f"strategies: {name!r} is not a strategy. Choose from {valid}.")
        require(
            strategies.count(name) == 1, f"strategies: {name!r} is there twice, and each has one folder. Name it once."
        )
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0].partition(".")[0]
        if key in OWN_KEYS:
            raise InputError(f"{override}: a comparison sets {key} itself ({OWN_KEYS[key]}). Leave it out.")


def run(strategy: str, overrides: Sequence[str], folder: Path, console: Console) -> Outcome:
    """Trains with one strategy in a process of its own; its output goes to `output.log` in the strategy's folder."""
    run_folder = folder / strategy
    run_folder.mkdir(parents=True, exist_ok=True)
    log = run_folder / "output.log"
    # Hydra reads quotes in an override: a path with spaces or commas is one value.
    quoted = str(run_folder).replace("'", "\\'")
    command = [sys.executable, *TRAIN, *overrides, f"strategy={strategy}", f"hydra.run.dir='{quoted}'"]
    start_s = time.monotonic()
    with log.open("wb") as output, console.status(f"{strategy}: starts") as status:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = follow(process, log, f"{strategy}: ", status, console.width)
        finally:
            process.kill()
            process.wait()
    took = f"{time.monotonic() - start_s:.0f} s"
    results_file = run_folder / RESULTS
    if code == 0 and results_file.exists():
        console.print(f"{strategy}: done in {took}")
        return Outcome(strategy, log, json.loads(results_file.read_text(encoding="utf-8")), None)
    console.print(f"{strategy}: failed after {took}")
    return Outcome(strategy, log, None, f"exit code {code}: {last_error(log)}")


def follow(process: subprocess.Popen[bytes], log: Path, label: str, status: Status, width: int) -> int:
    """Shows the log's last line until the process ends. Returns its exit code."""
    while (code := process.poll()) is None:
        lines = tail(log)
        if lines:
            status.update((label + lines[-1])[: width - 4].replace("[", r"\["))
        time.sleep(0.2)
    return code


def tail(log: Path, size: int = 8192) -> list[str]:
    """The lines at the end of a log, empty ones left out; a progress bar's states count as lines."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        text = file.read().decode("utf-8", errors="replace")
    return [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]


def last_error(log: Path) -> str:
    """The last line that begins with an error, or else the last line: Hydra adds a hint below the error itself."""
    lines = tail(log)
    errors = [line for line in lines if re.match(r"error\b|Error (?!executing)|[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[-1]


def columns(outcomes: Sequence[Outcome]) -> list[Column]:
    """What every run has, and the figures that its task names as those to compare."""
    results = next((outcome.results for outcome in outcomes if outcome.results is not None), None)
    item = (results["steps"] or {}).get("item", "items") if results else "items"
    headline = [(split, name) for split in ("val", "test") for name in (results["headline"] if results else ())]
    return [
        STEP_TIME,
        Column(f"{item}/s", "steps", "items_per_s", ".0f"),
        Column("first step s", "steps", "first_step_s", ".1f"),
        Column("peak MiB", "steps", "peak_mib", ".0f"),
        ADDED_MEMORY,
        Column("train loss", "metrics", "train/loss", ".4f"),
        *(
            Column(f"{split} {name}", "metrics", f"{split}/{name}", ".2f" if name == "ppl" else ".4f")
            for split, name in headline
        ),
    ]


def ratio(outcome: Outcome, first: Outcome) -> float | None:
    """How many times as fast a step is as the first strategy's; None where one of the two has no figure."""
    own, other = outcome.value(STEP_TIME), first.value(STEP_TIME)
    return other / own if own and other else None


def titles(outcomes: Sequence[Outcome]) -> list[str]:
    return ["strategy", *(column.title for column in columns(outcomes)), f"x {outcomes[0].strategy}"]


def cells(outcome: Outcome, outcomes: Sequence[Outcome]) -> list[str]:
    """The row of one of the strategies, which finished."""
    values = [(outcome.value(column), column.form) for column in columns(outcomes)]
    values.append((ratio(outcome, outcomes[0]), ".2f"))
    return [outcome.strategy, *("-" if value is None else format(value, form) for value, form in values)]


def text_table(outcomes: Sequence[Outcome]) -> str:
    """The table for the terminal: a title's words below each other; a failure takes the whole of its row."""
    head = [title.split(" ") for title in titles(outcomes)]
    top = [words[0] if len(words) > 1 else "" for words in head]
    done = {outcome.strategy: cells(outcome, outcomes) for outcome in outcomes if outcome.failure is None}
    grid = [top, [words[-1] if len(words) < 3 else " ".join(words[1:]) for words in head], *done.values()]
    widths = [max(len(row[place]) for row in grid) for place in range(len(head))]
    widths[0] = max(widths[0], *(len(outcome.strategy) for outcome in outcomes))

    def line(row: Sequence[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join([row[0].ljust(len(first)), *rest]).rstrip()

    lines = [line(row) for row in grid[:2]]
    for outcome in outcomes:
        name = outcome.strategy.ljust(widths[0])
        failed = f"{name}  failed, {outcome.failure}\n{' ' * widths[0]}  log: {outcome.log}"
        lines.append(failed if outcome.failure else line(done[outcome.strategy]))
    return "\n".join(lines)


def markdown_table(outcomes: Sequence[Outcome]) -> str:
    """The same table for report.md; a failure is told in a last column, which is there only if there is one."""
    any_failed = any(outcome.failure for outcome in outcomes)
    grid = [titles(outcomes), *(cells(outcome, outcomes) for outcome in outcomes)]
    notes = ["failed", *(f"{o.failure} (log: {o.log})" if o.failure else "" for o in outcomes)]
    if any_failed:
        grid = [[*row, note.replace("|", r"\|")] for row, note in zip(grid, notes, strict=True)]
    lines = ["| " + " | ".join(row) + " |" for row in grid]
    return "\n".join([lines[0], "|" + " --- |" * len(grid[0]), *lines[1:]])


def write_report(folder: Path, outcomes: Sequence[Outcome], overrides: Sequence[str], note: str) -> Path:
    """Writes report.md: the table, the picture, and what is needed to run it again. Returns its path."""
    command = " ".join([command_line("compare"), f"strategies=[{','.join(o.strategy for o in outcomes)}]", *overrides])
    lines = [
        f"# {', '.join(outcome.strategy for outcome in outcomes)}",
        "",
        f"    {command}",
        "",
        markdown_table(outcomes),
        "",
        "ms/batch and the rate are medians over all training batches but the first, without validation and data "
        "loading. peak MiB is the process's resident memory at its highest during fit, added MiB what fit added to it."
        f" val is of the last validation, test of {tested(outcomes)}. x {outcomes[0].strategy}: how many "
        f"times as fast as {outcomes[0].strategy} a batch is.",
        "",
        "![Loss, step time and memory](report.png)",
        "",
        f"{machine()}. Python {platform.python_version()}, {', '.join(versions())}. {note}".rstrip(),
        "",
    ]
    report = folder / "report.md"
    report.write_text("\n".join(lines), encoding="utf-8")
    return report


def tested(outcomes: Sequence[Outcome]) -> str:
    """Which checkpoints the test read."""
    names = {o.strategy: Path(o.results["checkpoint"]).name for o in outcomes if o.results is not None}
    if len(set(names.values())) == 1:
        return f"checkpoints/{next(iter(names.values()))}"
    return ", ".join(f"checkpoints/{name} for {strategy}" for strategy, name in names.items()) or "no checkpoint"


def busy() -> str:
    """A sentence if other programs keep the cores busy as the comparison starts; empty if not, or if unknown."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < cores / 4:
        return ""
    return f"Other programs were running (load {load:.1f} on {cores} cores): the times are not to be relied on."


def machine() -> str:
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{model}, {torch.get_num_threads()} threads, {platform.system()}"


def versions() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def read_curve(outcome: Outcome, tag: str) -> Curve:
    """A metric from the TensorBoard events of a strategy, without those of earlier runs in its folder; empty if it was
    never written.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(outcome.log.parent), size_guidance={"scalars": 0})
    events.Reload()
    if outcome.results is None or tag not in events.Tags()["scalars"]:
        return Curve([], [], [])
    scalars = events.Scalars(tag)
    steps = outcome.results["steps"] or {}
    start_s = steps.get("started_unix_s") or scalars[0].wall_time
    scalars = [scalar for scalar in scalars if scalar.wall_time >= start_s]
    return Curve([s.step for s in scalars], [s.wall_time - start_s for s in scalars], [s.value for s in scalars])


def draw(folder: Path, outcomes: Sequence[Outcome]) -> Path:
    """Writes report.png: training loss by step and by time, time of a step, memory. Returns its path."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    by_step, by_time, step_time, memory = figure.subplots(2, 2).flat
    done = [(f"C{place}", outcome) for place, outcome in enumerate(outcomes) if outcome.results is not None]
    for color, outcome in done:
        curve = read_curve(outcome, "train/loss")
        by_step.plot(curve.steps, curve.values, color=color, label=outcome.strategy)
        by_time.plot(curve.seconds, curve.values, color=color, label=outcome.strategy)
    label_curves(by_step, "training loss by step", "step")
    label_curves(by_time, "training loss by time", "seconds since fit began")
    names, colors = [outcome.strategy for _, outcome in done], [color for color, _ in done]
    draw_bars(step_time, "time of a training batch (median), ms", names, colors, [o.value(STEP_TIME) for _, o in done])
    above = [o.value(ADDED_MEMORY) for _, o in done]
    draw_bars(memory, "peak memory above the start of fit, MiB", names, colors, above)
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


def compare(strategies: Sequence[str], overrides: Sequence[str], folder: Path, console: Console) -> bool:
    """Runs and reports. Returns whether every strategy finished."""
    note = busy()
    if note:
        console.print(note, highlight=False)
    outcomes = [run(strategy, overrides, folder, console) for strategy in strategies]
    console.print("\n" + text_table(outcomes), soft_wrap=True, highlight=False, markup=False)
    report, picture = write_report(folder, outcomes, overrides, note), draw(folder, outcomes)
    for line in (f"\nreport  {report}", f"picture {picture}", f"curves  tensorboard --logdir {folder}"):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return all(outcome.failure is None for outcome in outcomes)


@hydra.main(version_base="1.3", config_path=str(configuration_folder()), config_name="compare")
def main(config: DictConfig) -> None:
    logging.getLogger("tensorboard").setLevel(logging.WARNING)  # it tells each events file that it opens
    settings = HydraConfig.get()
    overrides = [override for override in settings.overrides.task if not override.startswith("strategies=")]
    strategies = [str(name) for name in config.strategies]
    try:
        check(strategies, overrides)
    except InputError as error:
        sys.exit(f"error: {error}")
    if not compare(strategies, overrides, Path(settings.runtime.output_dir), Console()):
        sys.exit(1)


if __name__ == "__main__":
    main()
