"""The lines at the end of a fit."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import lit_ort
from lit_ort.callbacks import StepStatistics, peak_rss_bytes, reset_peak_rss, rss_bytes
from lit_ort.strategies.summary import FitSummary
from tests.lightning_models import Net, loader, trainer
from tests.strategies.test_progress import Printing

COSTS = re.compile(
    r"lit_ort: \d+\.\d ms per batch \(median of (?P<count>\d+)\), peak memory (at most )?\d+ MiB above the start"
)
TIMES = re.compile(
    r"lit_ort: time of runs: \d+% ONNX Runtime, \d+% torch operators in its sessions, \d+% eager PyTorch"
)


def fit_lines(caplog: pytest.LogCaptureFixture, strategy: Any, module: Any = None, **settings: Any) -> list[str]:
    """What a fit logs about lit_ort after its last batch."""
    settings = {"max_steps": 5, **settings}
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer(strategy, **settings).fit(Net() if module is None else module, loader(), loader())
    lines = [line for line in caplog.messages if line.startswith(("lit_ort", "`Trainer.fit` stopped"))]
    end = next((k for k, line in enumerate(lines) if line.startswith("`Trainer")), len(lines) - 1)
    return lines[end + 1 :]


def test_a_fit_ends_with_its_costs_and_what_ran_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    costs, graphs, times = fit_lines(caplog, "ort", default_root_dir=tmp_path)
    match = COSTS.fullmatch(costs)
    assert match is not None, costs
    assert match["count"] == "4"
    pattern = r"lit_ort: \d graphs? \(\d forward, \d fused\), no fallback, no graph break, compiled in \d+\.\d s"
    assert re.fullmatch(pattern, graphs), graphs
    assert TIMES.fullmatch(times), times


def test_graph_breaks_are_pointed_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, graphs, _ = fit_lines(caplog, "ort", Printing(), default_root_dir=tmp_path)
    assert "1 graph break, compiled in" in graphs
    assert graphs.endswith("; lit_ort.explain(trainer) shows where and why")


def test_step_statistics_have_their_own_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert fit_lines(caplog, "ort", callbacks=[StepStatistics()], default_root_dir=tmp_path) == []
    caplog.clear()
    (graphs,) = fit_lines(caplog, "ort", Printing(), callbacks=[StepStatistics()], default_root_dir=tmp_path)
    assert "1 graph break" in graphs


@pytest.mark.parametrize("strategy", ["auto", lit_ort.CompiledStrategy(backend="eager")])
def test_other_strategies_say_nothing(strategy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert fit_lines(caplog, strategy, default_root_dir=tmp_path) == []


def test_a_sanity_check_and_an_evaluation_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert fit_lines(caplog, "ort", max_steps=0, num_sanity_val_steps=1, default_root_dir=tmp_path) == []
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer("ort", default_root_dir=tmp_path).validate(Net(), loader(), verbose=False)
    assert not [line for line in caplog.messages if "per batch" in line or "time of runs" in line]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_nothing_compiled_is_no_summary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Constant(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    assert fit_lines(caplog, "ort", Constant(), limit_val_batches=0, default_root_dir=tmp_path) == []


def test_one_batch_has_no_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    costs, *_ = fit_lines(caplog, "ort", max_steps=1, default_root_dir=tmp_path)
    assert re.fullmatch(r"lit_ort: peak memory (at most )?\d+ MiB above the start", costs)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_manual_optimization_counts_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    costs, *_ = fit_lines(caplog, "ort", Manual(), max_steps=4, default_root_dir=tmp_path)
    match = COSTS.fullmatch(costs)
    assert match is not None
    assert match["count"] == "3"


def test_the_other_package_logs_it_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Plain(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.linear(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    own = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="ort",
        max_steps=3,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        own.fit(Plain(), loader())
    assert sum(COSTS.fullmatch(line) is not None for line in caplog.messages) == 1


def test_the_peak_is_a_bound_where_an_earlier_one_was_higher() -> None:
    if not reset_peak_rss():
        pytest.skip("the peak can be reset on Linux alone")
    log = lit_ort.ORTStrategy().compile_log
    memory = torch.ones(20 * 2**20)
    del memory
    summary = FitSummary(log)
    peak = peak_rss_bytes()
    assert peak is not None
    assert peak > rss_bytes()
    assert "at most" in summary.costs()
    memory = torch.ones(60 * 2**20)
    assert "at most" not in summary.costs()
    assert float(re.findall(r"(\d+) MiB", summary.costs())[0]) >= 230
    del memory


def test_memory_that_a_fit_has_freed_is_no_negative_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ort.strategies.summary.rss_bytes", lambda: 2**50)
    assert " 0 MiB above the start" in FitSummary(lit_ort.ORTStrategy().compile_log).costs()


def test_how_steps_ran_reaches_the_loggers(tmp_path: Path) -> None:
    table, board = CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")
    strategy, settings = lit_ort.ORTStrategy(compile="auto"), {"max_epochs": 1, "log_every_n_steps": 1}
    trainer(strategy, tmp_path, logger=[table, board], **settings).fit(Net(), loader(), loader())
    parameters = yaml.safe_load((Path(table.log_dir) / "hparams.yaml").read_text())
    assert parameters["dropout"] == 0.0
    assert parameters["lit_ort/training_step"] == "eager"
    assert parameters["lit_ort/training_step/eager_ms"] > 0
    events = EventAccumulator(board.log_dir)
    events.Reload()
    text = events.Tensors("lit_ort/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "training_step ran in eager" in text
