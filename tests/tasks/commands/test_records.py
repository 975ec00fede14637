"""Hyperparameters and final figures in the loggers: TensorBoard's own HPARAMS plugin reads what train.py writes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lit_ort_tasks.records import final_figures, hyperparameters
from omegaconf import OmegaConf
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context

from tests.tasks.commands.small import SMALL, TRAIN, run

pytestmark = pytest.mark.usefixtures("one_thread")

# Its classes are created at import.
messages: Any = api_pb2


def hparams_tab(folder: Path) -> tuple[list[str], list[str], dict[str, tuple[dict[str, Any], dict[str, float]]]]:
    """The names of the tab's hyperparameters and figures, and each run's values of both."""
    events = EventMultiplexer()
    events.AddRunsFromDirectory(str(folder))
    events.Reload()
    request, provider = context.RequestContext(), MultiplexerDataProvider(events, str(folder))
    plugin = Context(TBContext(data_provider=provider, logdir=str(folder)))
    runs, data = plugin.hparams_metadata(request, ""), plugin.hparams_from_data_provider(request, "", 0)
    experiment = plugin.experiment_from_metadata(request, "", True, runs, data)
    statuses = [value.number for value in messages.Status.DESCRIPTOR.values]
    query = messages.ListSessionGroupsRequest(slice_size=100, allowed_statuses=statuses)
    for metric in experiment.metric_infos:
        query.col_params.add(metric=metric.name)
    rows = {}
    for group in list_session_groups.Handler(request, plugin, "", query).run().session_groups:
        parameters = {name: value.string_value or value.number_value for name, value in group.hparams.items()}
        rows[group.sessions[0].name] = parameters, {m.name.tag: m.value for m in group.metric_values}
    return [info.name for info in experiment.hparam_infos], [m.name.tag for m in experiment.metric_infos], rows


def test_runs_are_rows_of_the_hparams_tab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    results = {
        name: run(monkeypatch, tmp_path / "runs" / name, text, "trainer.max_epochs=1", f"optimizer={name}", "seed=3")
        for name in ("adam", "sgd")
    }
    parameters, figures, rows = hparams_tab(tmp_path / "runs")
    # Columns that differ come first, and the tab shows the first five of both kinds.
    assert parameters[:2] == ["lr", "optimizer"]
    ends = ["end/peak_mib", "end/step_ms_median", "end/test_loss", "end/test_ppl", "end/val_ppl"]
    assert figures[:5] == ends
    for name, result in results.items():
        own, values = rows[name]
        assert own["optimizer"] == name
        assert (own["strategy"], own["task"], own["data"]) == ("eager", "transformer_lm", "wikitext2")
        assert (own["batch_size"], own["precision"], own["seed"], own["task.width"]) == (4, "32-true", 3, 8)
        assert values["end/test_ppl"] == pytest.approx(result["metrics"]["test/ppl"])
        assert values["end/step_ms_median"] == pytest.approx(result["steps"]["step_ms_median"])


def test_other_loggers_have_the_final_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    results = run(monkeypatch, tmp_path / "run", text, "trainer.max_epochs=1", "logger=csv")
    rows = list(csv.DictReader((tmp_path / "run" / "csv" / "metrics.csv").read_text().splitlines()))
    assert float(rows[-1]["end/test_ppl"]) == pytest.approx(results["metrics"]["test/ppl"])
    parameters = OmegaConf.load(tmp_path / "run" / "csv" / "hparams.yaml")
    assert parameters.strategy == "eager"
    assert parameters.config.trainer.max_epochs == 1


def test_numbers_of_the_command_line_are_hyperparameters() -> None:
    config = OmegaConf.create(
        dict(optimizer=dict(lr=0.1), task=dict(dropout=0.3, kind="a"), data=dict(batch_size=4), precision="32", seed=1)
    )
    overrides = ["task.dropout=0.3", "+task.kind=a", "optimizer.lr=0.1", "~callbacks.progress", "task=gpt2"]
    assert hyperparameters(config, {"strategy": "ort", "task": "gpt2", "scheduler": None}, overrides) == {
        **{"strategy": "ort", "task": "gpt2", "lr": 0.1, "batch_size": 4, "precision": "32", "seed": 1},
        "task.dropout": 0.3,
    }


def test_figures_that_are_missing_or_not_finite_are_left_out() -> None:
    results = {"metrics": {"test/loss": None, "test/ppl": 2.0, "train/loss": 1.0}, "headline": ["ppl"], "steps": None}
    assert final_figures(results) == {"end/test_ppl": 2.0}


@pytest.mark.slow
def test_wandb_records_runs_offline(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("wandb")
    arguments = [*SMALL, f"data.dir={text}", "trainer.max_steps=1", "logger=wandb", "logger.wandb.offline=true"]
    command = [sys.executable, str(TRAIN), "-m", *arguments, "seed=1,2", f"hydra.sweep.dir={tmp_path}/runs"]
    # Nothing answers at this address.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    folders = [path.relative_to(tmp_path / "runs").parts[0] for path in (tmp_path / "runs").rglob("*.wandb")]
    assert sorted(folders) == ["0-eager", "1-eager"]
