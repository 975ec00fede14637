"""train.py with hparams_search=optuna: each trial is a run, whose value is a figure of its last validation."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.tasks.commands.small import start

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Optuna 2 with SQLAlchemy 1.4.
    pytest.mark.filterwarnings("ignore:.*not compatible with SQLAlchemy 2.0"),
]


def search(monkeypatch: pytest.MonkeyPatch, folder: Path, text: Path, *overrides: str) -> list[float | None]:
    """Runs a search. Returns each trial's val/ppl; None where it has no results."""
    values = ("trainer.max_epochs=1", "hparams_search=optuna", f"data.dir={text}", f"hydra.sweep.dir={folder}")
    start(monkeypatch, *values, *overrides)
    trials = [path / "results.json" for path in sorted(folder.glob("*-eager"))]
    return [json.loads(path.read_text())["metrics"]["val/ppl"] if path.is_file() else None for path in trials]


def test_a_search_finds_the_trial_with_the_smallest_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    values = search(monkeypatch, tmp_path / "search", text, "hydra.sweeper.n_trials=2")
    best = OmegaConf.load(tmp_path / "search" / "optimization_results.yaml")
    assert len(values) == 2
    assert best.best_value == min(value for value in values if value is not None)
    # The command line of the small model fixes the dropout.
    assert set(best.best_params) == {"optimizer.lr"}


def test_a_storage_keeps_the_trials_of_a_study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    storage = f"hydra.sweeper.storage=sqlite:///{tmp_path}/trials.db"
    for name in ("first", "second"):
        study = (storage, "hydra.sweeper.study_name=study", "hydra.sweeper.n_trials=1")
        assert len(search(monkeypatch, tmp_path / name, text, *study)) == 1
    with sqlite3.connect(tmp_path / "trials.db") as trials:
        assert trials.execute("select count(*) from trials where state = 'COMPLETE'").fetchone() == (2,)


def test_a_trial_whose_loss_is_not_finite_fails_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = ("optimizer=sgd", "trainer.gradient_clip_val=null", "optimizer.lr=choice(1e-2,1e30)")
    values = search(monkeypatch, tmp_path / "search", text, *wild, "hydra.sweeper.n_trials=4", "seed=1")
    best = OmegaConf.load(tmp_path / "search" / "optimization_results.yaml")
    assert None in values
    assert best.best_params["optimizer.lr"] == 1e-2
    assert math.isfinite(best.best_value)
    assert "error: the training loss is" in capsys.readouterr().err
