"""report.md: the table of a comparison, and what is needed to repeat it."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from pathlib import Path

from lit_ort.benchmark.machine import machine, versions
from lit_ort_tasks.commands.program import command_line
from lit_ort_tasks.comparison.outcome import Outcome
from lit_ort_tasks.comparison.table import markdown_table


def write_report(folder: Path, outcomes: Sequence[Outcome], overrides: Sequence[str], note: str) -> Path:
    """Writes report.md: the table, the picture, the command, the machine and the versions. Returns its path."""
    arguments = [f"strategies=[{','.join(outcome.strategy for outcome in outcomes)}]", *overrides]
    first = outcomes[0].strategy
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"# {', '.join(outcome.strategy for outcome in outcomes)}",
        "",
        f"    {command_line('compare')} {shlex.join(arguments)}",
        "",
        markdown_table(outcomes),
        "",
        "ms/batch and the rate are medians over all training batches but the first, without validation and data "
        "loading. peak MiB is the highest resident memory of the process during fit, added MiB the part above the "
        f"memory at the start of fit. val is of the last validation, test of {tested(outcomes)}. x {first}: how many "
        f"times as fast as {first} a batch is.",
        "",
        "![Loss, step time and memory](report.png)",
        "",
        f"{machine()}, {platform.system()}. Python {platform.python_version()}, {packages}. {note}".rstrip(),
        "",
    ]
    report = folder / "report.md"
    report.write_text("\n".join(lines), encoding="utf-8")
    return report


def tested(outcomes: Sequence[Outcome]) -> str:
    """The checkpoints that were tested."""
    names = {o.strategy: Path(o.results["checkpoint"]).name for o in outcomes if o.results is not None}
    if len(set(names.values())) == 1:
        return f"checkpoints/{next(iter(names.values()))}"
    return ", ".join(f"checkpoints/{name} for {strategy}" for strategy, name in names.items()) or "no checkpoint"
