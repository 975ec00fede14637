"""The table at the end of a multirun, and the messages in the log of each run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lit_ort_tasks.comparison.sweep import outcomes_of
from lit_ort_tasks.comparison.table import text_table
from omegaconf import OmegaConf

from tests.tasks.commands.small import SMALL, TRAIN


def write_run(folder: Path, overrides: list[str], results: dict[str, Any] | None) -> None:
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(overrides), folder / ".hydra" / "overrides.yaml")
    if results is not None:
        (folder / "results.json").write_text(json.dumps(results))


def test_runs_are_named_by_what_differs_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    steps = {"step_ms_median": 2.0, "items_per_s": 10.0, "first_step_s": 1.0, "peak_mib": 5.0, "item": "rows"}
    for number in (10, 2):
        results = {"steps": steps, "metrics": {"val/loss": float(number)}, "headline": ["loss"]}
        write_run(tmp_path / f"{number}-ort", ["task=bert", f"seed={number}"], results)
    write_run(tmp_path / "11-ort", ["task=bert", "seed=11"], None)
    (tmp_path / "multirun.yaml").write_text("")
    outcomes = outcomes_of(tmp_path)
    assert [outcome.strategy for outcome in outcomes] == ["seed=2", "seed=10", "seed=11"]
    table = text_table(outcomes, "run")
    assert table.splitlines()[1].startswith("run")
    assert "2.0000" in table
    assert "seed=11  failed, without results" in table


def test_a_folder_without_runs_has_no_table(tmp_path: Path) -> None:
    assert not outcomes_of(tmp_path)


@pytest.mark.slow
def test_a_multirun_ends_with_a_table_and_each_run_has_its_messages(tmp_path: Path, text: Path) -> None:
    arguments = [*SMALL, f"data.dir={text}", "trainer.max_steps=1", "seed=1,2", f"hydra.sweep.dir={tmp_path}/runs"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TRAIN), "-m", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()[-4:-1]] == ["run", "seed=1", "seed=2"]
    for folder in sorted((tmp_path / "runs").glob("*-eager")):
        assert (folder / "train.log").read_text().count("`max_steps=1` reached") == 1
