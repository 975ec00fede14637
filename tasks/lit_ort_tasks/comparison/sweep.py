"""Prints a table of the runs of a multirun at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lit_ort_tasks.comparison.outcome import Outcome
from lit_ort_tasks.comparison.table import text_table
from lit_ort_tasks.runs import RESULTS

_OVERRIDES = Path(".hydra") / "overrides.yaml"


class SweepTable(Callback):
    """Prints the figures of each run, which is named by its overrides that not all runs have."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        outcomes = outcomes_of(Path(config.hydra.sweep.dir))
        if outcomes:
            table = text_table(outcomes, "run")
            Console(highlight=False).print(f"\n{table}\n{config.hydra.sweep.dir}", soft_wrap=True, markup=False)


def outcomes_of(folder: Path) -> list[Outcome]:
    """The outcomes of the runs in the folder of a multirun, in the order in which they started."""
    runs = sorted((path.parents[1] for path in folder.glob(f"*/{_OVERRIDES}")), key=_number)
    overrides = [[str(word) for word in OmegaConf.load(run / _OVERRIDES)] for run in runs]
    shared = set.intersection(*map(set, overrides)) if overrides else set[str]()
    names = [
        " ".join(word for word in words if word not in shared) or run.name
        for run, words in zip(runs, overrides, strict=True)
    ]
    return [_outcome(name, run) for name, run in zip(names, runs, strict=True)]


def _number(run: Path) -> tuple[int, str]:
    number = run.name.partition("-")[0]
    return int(number) if number.isdecimal() else 0, run.name


def _outcome(name: str, run: Path) -> Outcome:
    file = run / RESULTS
    if file.is_file():
        return Outcome(name, run / "train.log", json.loads(file.read_text()), None)
    return Outcome(name, run / "train.log", None, "without results")
