"""The tables and the picture of the suite's results."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import GROUPS, TASKS

Line = dict[str, Any]
EAGER, INDUCTOR, ORT = "eager", "inductor", "ort"
SLOWEST = 5
# In the summary of `explain`.
_SHARE = re.compile(r"(\d+)% ONNX Runtime")


def table(lines: Sequence[Line]) -> str:
    """One table for each size and precision, with the slowest models first."""
    parts = []
    for size, precision in dict.fromkeys((line["size"], line["precision"]) for line in lines):
        panel = [line for line in lines if (line["size"], line["precision"]) == (size, precision)]
        parts.append(_table([line for line in panel if "error" not in line], f"{size} models, {precision}"))
        parts += [f"{line['model']}: {line['error']}" for line in panel if "error" in line]
    return "\n\n".join(parts)


def _table(lines: Sequence[Line], title: str) -> str:
    if not lines:
        return f"{title}: none measured"
    versions = ", ".join(f"{name} {version}" for name, version in lines[-1]["versions"].items())
    head = (
        "| model | eager, ms | inductor, ms | ort, ms | ort / eager | ort / inductor | first step, s: inductor, ort, "
        "ort from cache | peak memory, MB: eager, inductor, ort | in ONNX Runtime | error | fallbacks |"
    )
    rows = [_row(line) for line in sorted(lines, key=_to_eager, reverse=True)]
    caption = f"{title}; {lines[-1]['machine']}; {versions}; {lines[-1]['date']}"
    return "\n".join([caption, "", head, "|" + "---|" * 11, *rows])


def summary(lines: Sequence[Line]) -> str:
    """A table of geometric means for each size and precision, and a list of the slowest models."""
    rows = [
        "| models | | step, ort / eager | faster | step, ort / inductor | faster | peak memory, ort / eager | first "
        "step, ort / inductor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    slowest = []
    for size, precision in dict.fromkeys((line["size"], line["precision"]) for line in lines):
        selected = (line for line in lines if (line["size"], line["precision"]) == (size, precision))
        panel = [line for line in selected if "error" not in line]
        for name, group in _groups(panel):
            rows.append(f"| {size}, {precision} | {name}, {len(group)} | {' | '.join(_summary(group))} |")
        names = "; compared with inductor: ".join(filter(None, (_slowest(panel, to) for to in (EAGER, INDUCTOR))))
        slowest.append(f"Slowest compared with eager, {size}, {precision}: {names}.")
    return "\n".join([*rows, "", *slowest])


def _slowest(lines: Sequence[Line], to: str) -> str:
    worst = sorted(_compared(lines, to), key=lambda line: ratio(line, to), reverse=True)[:SLOWEST]
    return ", ".join(f"{line['model']} {ratio(line, to):.2f}" for line in worst)


def _groups(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    """The lines of each group that is not empty, and of all groups together, without this project's tasks."""
    groups = {name: [line for line in lines if line["model"] in models] for name, models in GROUPS.items()}
    tasks = groups.pop(TASKS)
    everything = [line for group in groups.values() for line in group]
    return [(name, group) for name, group in [*groups.items(), ("all of these", everything), (TASKS, tasks)] if group]


def _compared(lines: Sequence[Line], to: str) -> list[Line]:
    """The lines in which a baseline was measured."""
    return [line for line in lines if to in line["figures"]]


def _row(line: Line) -> str:
    figures = line["figures"]
    of_ort, has_inductor = figures[ORT], INDUCTOR in figures
    first = [figures.get(INDUCTOR, {}).get("first_step_s"), of_ort["first_step_s"], of_ort["cached_first_step_s"]]
    peaks = [figures.get(name, {}).get("peak_mb") for name in (EAGER, INDUCTOR, ORT)]
    error, share = of_ort["gradient_error"], _SHARE.search(of_ort["ran"])
    cells = [
        line["model"],
        *(f"{median(line, name):.1f}" if name in figures else "" for name in (EAGER, INDUCTOR, ORT)),
        f"{ratio(line, EAGER):.2f}",
        f"{ratio(line, INDUCTOR):.2f}" if has_inductor else "",
        _list(first, ".1f"),
        _list(peaks, ".0f"),
        "" if share is None else f"{share[1]} %",
        "draws" if error is None else f"{error:.0e}",
        str(len(of_ort["fallbacks"])),
    ]
    return f"| {' | '.join(cells)} |"


def _list(values: Iterable[float | None], form: str) -> str:
    return ", ".join("" if value is None else format(value, form) for value in values)


def median(line: Line, baseline: str) -> float:
    """The median time of a step, in milliseconds."""
    return statistics.median(line["figures"][baseline]["step_ms"])


def ratio(line: Line, to: str) -> float:
    """The median step time of `ort` divided by that of another baseline."""
    return median(line, ORT) / median(line, to)


def _to_eager(line: Line) -> float:
    return ratio(line, EAGER)


def _summary(lines: Sequence[Line]) -> list[str]:
    cells = []
    for to in (EAGER, INDUCTOR):
        ratios = [ratio(line, to) for line in _compared(lines, to)]
        cells += [f"{mean(ratios):.2f}", f"{sum(r < 1 for r in ratios)} of {len(ratios)}"] if ratios else ["", ""]
    peaks = [line["figures"][ORT]["peak_mb"] / line["figures"][EAGER]["peak_mb"] for line in lines if _has_peaks(line)]
    pairs = [(line["figures"][ORT], line["figures"][INDUCTOR]) for line in _compared(lines, INDUCTOR)]
    firsts = [of_ort["first_step_s"] / other["first_step_s"] for of_ort, other in pairs]
    return [*cells, *(f"{mean(ratios):.2f}" if ratios else "" for ratios in (peaks, firsts))]


def _has_peaks(line: Line) -> bool:
    return all((line["figures"][name]["peak_mb"] or 0) > 0 for name in (EAGER, ORT))


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def picture(lines: Sequence[Line], path: Path) -> None:
    """Draws bars of each model's ratios of step times, around 1, with a panel for each size and precision."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    measured = [line for line in lines if "error" not in line]
    if not measured:
        return
    panels = list(dict.fromkeys((line["size"], line["precision"]) for line in measured))
    names = list(dict.fromkeys(line["model"] for line in sorted(measured, key=_to_eager)))
    size = (3 + 5 * len(panels), 1.5 + 0.3 * len(names))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        panel_lines = [line for line in measured if (line["size"], line["precision"]) == panel]
        _draw(axis, panel_lines, {name: k for k, name in enumerate(names)})
        axis.set_title(", ".join(panel), loc="left")
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].margins(y=0.01)
    figure.supxlabel("time of a training step with ONNX Runtime, relative to the other baseline (left of 1: faster)")
    figure.suptitle(f"{measured[-1]['machine']}, {measured[-1]['date']}", fontsize=9)
    axes[0][-1].legend(loc="upper left")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw(axis: Any, lines: Sequence[Line], positions: Mapping[str, int]) -> None:
    for offset, to, color in ((-0.2, EAGER, "tab:blue"), (0.2, INDUCTOR, "tab:orange")):
        compared = _compared(lines, to)
        if not compared:
            continue
        rows = [positions[line["model"]] + offset for line in compared]
        axis.barh(
            rows, [ratio(line, to) - 1 for line in compared], 0.38, left=1, color=color, label=f"relative to {to}"
        )
    axis.axvline(1, color="black", linewidth=0.8)
