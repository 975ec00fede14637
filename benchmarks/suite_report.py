"""The table and the picture of a suite's results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import GROUPS, TASKS

Line = dict[str, Any]
EAGER, INDUCTOR, ORT = "eager", "inductor", "ort"
SLOWEST = 5


def table(lines: Sequence[Line]) -> str:
    """One table for each size and precision, the slowest models first."""
    parts = []
    for size, precision in dict.fromkeys((line["size"], line["precision"]) for line in lines):
        own = [line for line in lines if (line["size"], line["precision"]) == (size, precision)]
        parts.append(_table([line for line in own if "error" not in line], f"{size} models, {precision}"))
        parts += [f"{line['model']}: {line['error']}" for line in own if "error" in line]
    return "\n\n".join(parts)


def _table(lines: Sequence[Line], title: str) -> str:
    if not lines:
        return f"{title}: none measured"
    versions = ", ".join(f"{name} {version}" for name, version in lines[-1]["versions"].items())
    head = (
        "| model | eager, ms | inductor, ms | ort, ms | to eager | to inductor | first step, s: inductor, ort, from "
        "the cache | peak MB: eager, inductor, ort | error | fallbacks |"
    )
    rows = [_row(line) for line in sorted(lines, key=_to_eager, reverse=True)]
    where = f"{title}; {lines[-1]['machine']}; {versions}; {lines[-1]['date']}"
    return "\n".join([where, "", head, "|---|---|---|---|---|---|---|---|---|---|", *rows])


def summary(lines: Sequence[Line]) -> str:
    """A table of the geometric means of each size and precision, with the slowest models of each named."""
    found = [
        "| models | | step to eager's | faster | step to inductor's | faster | peak memory to eager's | first step to "
        "inductor's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    slowest = []
    for size, precision in dict.fromkeys((line["size"], line["precision"]) for line in lines):
        own = [line for line in lines if (line["size"], line["precision"]) == (size, precision) and "error" not in line]
        for name, part in _groups(own):
            found.append(f"| {size}, {precision} | {name}, {len(part)} | {' | '.join(_summary(part))} |")
        named = "; beside inductor: ".join(_slowest(own, to) for to in (EAGER, INDUCTOR))
        slowest.append(f"Slowest beside eager, {size}, {precision}: {named}.")
    return "\n".join([*found, "", *slowest])


def _slowest(lines: Sequence[Line], to: str) -> str:
    worst = sorted(lines, key=lambda line: ratio(line, to), reverse=True)[:SLOWEST]
    return ", ".join(f"{line['model']} {ratio(line, to):.2f}" for line in worst)


def _groups(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    """The lines of each group that has any; all of them count together, but for this project's own tasks."""
    named = {group: [line for line in lines if line["model"] in models] for group, models in GROUPS.items()}
    own = named.pop(TASKS)
    everyone = [line for group in named.values() for line in group]
    return [(name, part) for name, part in [*named.items(), ("all of these", everyone), (TASKS, own)] if part]


def _row(line: Line) -> str:
    own = line["figures"]
    first = [own[INDUCTOR]["first_step_s"], own[ORT]["first_step_s"], own[ORT]["cached_first_step_s"]]
    peaks = [own[name]["peak_mb"] for name in (EAGER, INDUCTOR, ORT)]
    error = own[ORT]["gradient_error"]
    cells = [
        line["model"],
        *(f"{median(line, name):.1f}" for name in (EAGER, INDUCTOR, ORT)),
        f"{ratio(line, EAGER):.2f}",
        f"{ratio(line, INDUCTOR):.2f}",
        ", ".join(f"{seconds:.1f}" for seconds in first),
        ", ".join("" if peak is None else f"{peak:.0f}" for peak in peaks),
        "draws" if error is None else f"{error:.0e}",
        str(len(own[ORT]["fallbacks"])),
    ]
    return f"| {' | '.join(cells)} |"


def median(line: Line, baseline: str) -> float:
    """Milliseconds of a step."""
    return statistics.median(line["figures"][baseline]["step_ms"])


def ratio(line: Line, to: str) -> float:
    return median(line, ORT) / median(line, to)


def _to_eager(line: Line) -> float:
    return ratio(line, EAGER)


def _summary(lines: Sequence[Line]) -> list[str]:
    cells = []
    for to in (EAGER, INDUCTOR):
        ratios = [ratio(line, to) for line in lines]
        cells += [f"{mean(ratios):.2f}", f"{sum(r < 1 for r in ratios)} of {len(ratios)}"]
    peaks = [line["figures"][ORT]["peak_mb"] / line["figures"][EAGER]["peak_mb"] for line in lines if _has_peaks(line)]
    firsts = [line["figures"][ORT]["first_step_s"] / line["figures"][INDUCTOR]["first_step_s"] for line in lines]
    return [*cells, f"{mean(peaks):.2f}" if peaks else "", f"{mean(firsts):.2f}"]


def _has_peaks(line: Line) -> bool:
    return all((line["figures"][name]["peak_mb"] or 0) > 0 for name in (EAGER, ORT))


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def picture(lines: Sequence[Line], path: Path) -> None:
    """Bars of each model's step time to eager's and inductor's, around 1; a panel for each size and precision."""
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
        own = [line for line in measured if (line["size"], line["precision"]) == panel]
        _draw(axis, own, {name: k for k, name in enumerate(names)})
        axis.set_title(", ".join(panel), loc="left")
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].margins(y=0.01)
    figure.supxlabel("time of a training step through ONNX Runtime, as a part of the other's (left of 1: faster)")
    figure.suptitle(f"{measured[-1]['machine']}, {measured[-1]['date']}", fontsize=9)
    axes[0][-1].legend(loc="lower right")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw(axis: Any, lines: Sequence[Line], places: Mapping[str, int]) -> None:
    for offset, to, color in ((-0.2, EAGER, "tab:blue"), (0.2, INDUCTOR, "tab:orange")):
        rows = [places[line["model"]] + offset for line in lines]
        axis.barh(rows, [ratio(line, to) - 1 for line in lines], 0.38, left=1, color=color, label=f"to {to}")
    axis.axvline(1, color="black", linewidth=0.8)
