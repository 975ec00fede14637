"""Measures step time and compile time by number of layers, batch size and length, as a table and a picture.

    python benchmarks/sizes.py --workload gpt2 --picture sizes.png

Each point is a run of `step_time.py` in a separate process, with interleaved baselines. Prints one line of JSON for
each point.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

STEP_TIME = Path(__file__).with_name("step_time.py")
BASELINES = ("eager", "inductor", "ort")
# One of these varies at a time; the others have the workload's defaults.
AXES = {"layers": (4, 12, 24), "batch": (1, 2, 4, 8), "length": (64, 128, 256, 512)}
FIGURES = {"step_ms": "step, ms", "compile_seconds": "first step minus a later step, s"}


def main() -> None:
    arguments = parse()
    points: dict[str, dict[int, dict[str, Any]]] = {}
    for axis in arguments.axes:
        for number in AXES[axis]:
            baselines = point(arguments.workload, axis, number, arguments.rounds)
            points.setdefault(axis, {})[number] = baselines
            print(json.dumps({"workload": arguments.workload, axis: number, "baselines": baselines}), flush=True)
    for axis, values in points.items():
        print(f"\n{table(axis, values)}")
    draw(points, arguments.workload).savefig(arguments.picture, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=("bert", "gpt2"), default="gpt2", help="the model to time")
    parser.add_argument("--axes", nargs="+", choices=tuple(AXES), default=list(AXES), help="the dimensions to vary")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each baseline")
    parser.add_argument("--picture", default="sizes.png", help="the file of the picture")
    return parser.parse_args()


def point(workload: str, axis: str, number: int, rounds: int) -> dict[str, Any]:
    """The baselines' figures for one value of an axis."""
    command = [sys.executable, str(STEP_TIME), "--workload", workload, "--times-only", "--rounds", str(rounds)]
    command += ["--shape", f"{axis}={number}", "--baselines", *BASELINES]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    baselines = json.loads(result.stdout.splitlines()[-1])["baselines"]
    return {name: {figure: baselines[name][figure] for figure in FIGURES} for name in BASELINES}


def table(axis: str, values: dict[int, dict[str, Any]]) -> str:
    titles = [axis, *(f"{name}, ms" for name in BASELINES), "ort / eager", "ort / inductor"]
    titles.append("compilation, s: inductor, ort")
    lines = [f"| {' | '.join(titles)} |"]
    lines.append("|" + "---|" * len(titles))
    for number, baselines in values.items():
        step = [baselines[name]["step_ms"] for name in BASELINES]
        ratios = (step[-1] / step[0], step[-1] / step[1])
        compilation = ", ".join(f"{baselines[name]['compile_seconds']:.1f}" for name in BASELINES[1:])
        cells = [str(number), *(f"{ms:.0f}" for ms in step), *(f"{ratio:.2f}" for ratio in ratios), compilation]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(points: dict[str, dict[int, dict[str, Any]]], workload: str) -> Figure:
    figure = Figure(figsize=(4 * len(points), 7), layout="constrained")
    grid = figure.subplots(len(FIGURES), len(points), squeeze=False)
    for column, (axis, values) in enumerate(points.items()):
        for row, (name, title) in enumerate(FIGURES.items()):
            _lines(grid[row][column], values, name)
            grid[row][column].set(xlabel=axis, ylabel=title, ylim=(0, None), xticks=list(values))
    grid[0][0].legend()
    figure.suptitle(workload)
    return figure


def _lines(axes: Axes, values: dict[int, dict[str, Any]], figure: str) -> None:
    for name in BASELINES:
        axes.plot(list(values), [baselines[name][figure] for baselines in values.values()], marker="o", label=name)
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
