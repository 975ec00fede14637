"""Trains the same model with several strategies and reports the results (`lit-ort compare --help`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from lit_ort.benchmark.machine import busy
from lit_ort_tasks.commands.program import configuration_folder
from lit_ort_tasks.comparison.picture import draw
from lit_ort_tasks.comparison.processes import require_comparable, run, strategies_of
from lit_ort_tasks.comparison.report import write_report
from lit_ort_tasks.comparison.table import text_table
from lit_ort_tasks.errors import InputError


def compare(strategies: Sequence[str], overrides: Sequence[str], folder: Path, console: Console) -> bool:
    """Runs the strategies and reports. Returns whether every strategy finished."""
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
    logging.getLogger("tensorboard").setLevel(logging.WARNING)  # it logs each events file that it opens
    settings = HydraConfig.get()
    overrides = [override for override in settings.overrides.task if not override.startswith("strategies=")]
    try:
        strategies = strategies_of(config.strategies)
        require_comparable(strategies, overrides)
    except InputError as error:
        sys.exit(f"error: {error}")
    if not compare(strategies, overrides, Path(settings.runtime.output_dir), Console()):
        sys.exit(1)


if __name__ == "__main__":
    main()
