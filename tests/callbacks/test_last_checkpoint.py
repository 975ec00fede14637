"""When the last checkpoint is written: at early stops and signals of both packages, and not by a trial run."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lit_ort.callbacks import BestCheckpoint, LastCheckpoint
from tests.lightning_models import Net, loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging:UserWarning"),
    pytest.mark.filterwarnings("ignore:You .* Skipping val loop:UserWarning"),
    pytest.mark.filterwarnings("ignore:.* with multiple `ModelCheckpoint` callbacks:UserWarning"),
]
QUIET: dict[str, Any] = dict(
    accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False, num_sanity_val_steps=0
)


class AtSecondBatch(Callback):
    """Ends a run after its second batch, as a limit of time does, or by a signal."""

    def __init__(self, signum: int | None = None) -> None:
        self.signum = signum

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.signum is None:
            trainer.should_stop = True
        elif batch_idx == 1:
            assert self.signum is not None
            os.kill(os.getpid(), self.signum)


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=False)["global_step"]


def test_an_early_stop_within_an_epoch(tmp_path: Path) -> None:
    last = LastCheckpoint(tmp_path, train_time_interval=None)
    Trainer(**QUIET, max_epochs=3, callbacks=[AtSecondBatch(), last]).fit(Net(), loader())
    assert step_of(last.path) == 2


def test_an_early_stop_that_a_minimum_of_steps_delays(tmp_path: Path) -> None:
    last = LastCheckpoint(tmp_path, train_time_interval=None, save_on_train_epoch_end=False)
    Trainer(**QUIET, max_epochs=3, min_steps=7, callbacks=[AtSecondBatch(), last]).fit(Net(), loader())
    assert step_of(last.path) == 7


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals(tmp_path: Path, package: str, signum: int) -> None:
    last = LastCheckpoint(tmp_path)
    trainer = importlib.import_module(package).Trainer(
        **QUIET, max_epochs=3, limit_val_batches=0, strategy="ort", callbacks=[AtSecondBatch(signum), last]
    )
    module = importlib.import_module(f"{package}.demos.boring_classes").BoringModel()
    with pytest.raises(SystemExit) as raised:
        trainer.fit(module)
    assert raised.value.code == 128 + signum
    assert step_of(last.path) == 2


def test_a_trial_run_leaves_the_file(tmp_path: Path) -> None:
    last = LastCheckpoint(tmp_path)
    Trainer(**QUIET, max_epochs=1, callbacks=[last]).fit(Net(), loader())
    before = last.path.read_bytes()
    Trainer(**QUIET, fast_dev_run=True, callbacks=[LastCheckpoint(tmp_path)]).fit(Net(), loader())
    assert last.path.read_bytes() == before


def test_the_best_checkpoint_in_any_order(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path, "best", monitor="val_loss", enable_version_counter=False)
    own = Trainer(**QUIET, max_epochs=1, callbacks=[LastCheckpoint(tmp_path), best])
    own.fit(Net(), loader(), loader())
    (metrics,) = own.test(Net(), loader(), ckpt_path="best", verbose=False, weights_only=False)
    assert "test_loss" in metrics
