"""Runs that are stopped, and resume with the results of an uninterrupted run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lit_ort_tasks.data.loaders import Shuffled, evaluation_loader, training_loader
from torch import Tensor, nn
from torch.utils.data import Dataset

from lit_ort import LitOrtWarning
from lit_ort.callbacks import BestCheckpoint, LastCheckpoint, NonFiniteLoss
from lit_ort.errors import NonFiniteError, OptionsError

BATCHES, EPOCHS = 6, 3


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Recorder(LightningModule):
    """Records the items of training and validation. Its weight depends on all of them, and on random numbers."""

    def __init__(self, dropout: float = 0.0, scheduled: bool = False) -> None:
        super().__init__()
        self.layer, self.dropout, self.scheduled = nn.Linear(1, 1), nn.Dropout(dropout), scheduled
        self.batches: list[tuple[str, int, list[float]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batches.append(("train", self.trainer.global_step, batch.flatten().tolist()))
        return (self.layer(self.dropout(batch)) - 0.1 * batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.batches.append(("val", self.trainer.global_step, batch.flatten().tolist()))
        self.log("val/loss", (self.layer(batch) - batch).square().mean(), on_epoch=True)

    def train_dataloader(self) -> Any:
        return training_loader(Shuffled(Numbers(), 1), 2, self.trainer)

    def val_dataloader(self) -> Any:
        return evaluation_loader(Shuffled(Numbers(), None), 4, self.trainer)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if not self.scheduled:
            return optimizer
        # For this, Lightning creates the loaders before it reads a checkpoint.
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SendsSignal(Callback):
    """Sends this process a signal in the n-th call of a hook."""

    def __init__(self, hook: str, count: int, signum: int = signal.SIGTERM) -> None:
        self.left, self.signum = count, signum
        setattr(self, hook, self._count)

    def _count(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.sanity_checking:
            return
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.signum)


def fit(folder: Path, *callbacks: Callback, resume: Path | None = None, **options: Any) -> Recorder:
    torch.manual_seed(1)
    strategy = options.pop("strategy", "auto")
    # Only ORTStrategy's random state is part of the checkpoint.
    module = Recorder(0.5 if strategy == "ort" else 0.0, options.pop("scheduled", False))
    last = LastCheckpoint(folder, **options.pop("last", {}))
    best = BestCheckpoint(
        folder, "best", monitor="val/loss", save_on_train_epoch_end=False, enable_version_counter=False
    )
    settings = dict(enable_progress_bar=False, enable_model_summary=False, logger=False, num_sanity_val_steps=0)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[*callbacks, best, last],
        **settings,
        **options,
    )
    trainer.fit(module, ckpt_path=resume, weights_only=resume is not None)
    return module


def stopped(folder: Path, callback: Callback, **options: Any) -> tuple[list[Any], int]:
    """The batches of a stopped run, and its exit code."""
    modules: list[Recorder] = []

    class KeepsModule(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            modules.append(pl_module)

    with pytest.raises(SystemExit) as caught:
        fit(folder, KeepsModule(), callback, **options)
    return modules[0].batches, caught.value.code  # pyright: ignore[reportReturnType]


POINTS = [
    ("on_train_batch_start", 1),
    ("on_train_batch_start", 9),
    ("on_train_batch_end", 3),
    ("on_train_batch_end", BATCHES),
    ("on_train_batch_end", 2 * BATCHES),
    ("on_validation_batch_start", 1),
    ("on_validation_batch_end", 2),
    ("on_validation_batch_end", 5),
    ("on_validation_batch_end", 6),
    ("on_train_epoch_end", 1),
    ("on_train_epoch_start", 2),
]


OPTIONS = [{}, {"val_check_interval": 2}, {"accumulate_grad_batches": 2}]
CASES = [
    *((*point, options) for point in POINTS for options in OPTIONS),
    ("on_train_batch_start", 9, {"strategy": "ort"}),
    pytest.param("on_validation_batch_end", 5, {"strategy": "ort"}, marks=pytest.mark.sweep),
    ("on_train_batch_start", 9, {"scheduled": True}),
    ("on_train_batch_end", 2 * BATCHES, {"scheduled": True}),
    ("on_validation_batch_end", 2, {"scheduled": True}),
]


@pytest.mark.sampled(9)
@pytest.mark.slow
@pytest.mark.parametrize(("hook", "count", "options"), CASES, ids=str)
def test_a_resumed_run_has_the_batches_and_weights_of_an_uninterrupted_one(
    tmp_path: Path, hook: str, count: int, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    whole = fit(tmp_path / "whole", **options)
    before, code = stopped(tmp_path / "part", SendsSignal(hook, count), **options)
    assert code == 143
    output = capfd.readouterr().err
    last = tmp_path / "part" / "last.ckpt"
    assert re.search(rf"stopped by SIGTERM at step \d+ of epoch \d; saved {re.escape(str(last))}. Resume: ", output)
    after = fit(tmp_path / "part", resume=last, **options)
    trained = [batch for batch in whole.batches if batch[0] == "train"]
    assert [batch for batch in (*before, *after.batches) if batch[0] == "train"] == trained
    assert torch.equal(after.layer.weight, whole.layer.weight)
    # An interrupted validation is repeated as a whole.
    validated = [batch for batch in whole.batches if batch[0] == "val"]
    steps = dict.fromkeys(step for _, step, _ in validated)
    for step in steps:
        once = [batch for batch in validated if batch[1] == step]
        resumed = [batch for batch in after.batches if batch[:2] == ("val", step)]
        assert resumed in ([], once), step
        assert resumed or [batch for batch in before if batch[:2] == ("val", step)] == once, step


@pytest.fixture
def plain_ctrl_c() -> Iterator[None]:
    """Installs Python's handler for the test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("plain_ctrl_c")
def test_ctrl_c_stops_after_the_batch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, code = stopped(tmp_path, SendsSignal("on_train_batch_start", 4, signal.SIGINT))
    assert code == 130
    output = capfd.readouterr().err
    assert "stopping after this batch; Ctrl-C again stops at once" in output
    assert "stopped by SIGINT at step 4 of epoch 0" in output
    assert (tmp_path / "last.ckpt").exists()
    with pytest.raises(KeyboardInterrupt):  # Python's handler, as before the run
        os.kill(os.getpid(), signal.SIGINT)


class SendsTwice(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("plain_ctrl_c")
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path, SendsTwice())
    assert caught.value.code == 1
    assert not (tmp_path / "last.ckpt").exists()


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path, self.steps = path, []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.path.exists():
            step = torch.load(self.path, weights_only=True)["global_step"]
            if step not in self.steps:
                self.steps.append(step)


@pytest.mark.parametrize(
    ("last", "steps"),
    [
        ({"train_time_interval": 1e-9}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]),
        ({"train_time_interval": None}, [6, 12]),
        ({"every_n_train_steps": 4}, [4, 6, 8, 12, 16]),
        ({"every_n_train_steps": 4, "save_on_train_epoch_end": False}, [4, 8, 12, 16]),
    ],
)
def test_checkpoints_within_an_epoch(tmp_path: Path, last: dict[str, Any], steps: list[int]) -> None:
    saves = Saves(tmp_path / "last.ckpt")
    fit(tmp_path, saves, last=last)
    assert saves.steps == steps


def test_a_checkpoint_is_due_at_the_last_batch_without_validation(tmp_path: Path) -> None:
    last = {"every_n_train_steps": 6, "train_time_interval": None, "save_on_train_epoch_end": False}
    fit(tmp_path, last=last, limit_val_batches=0)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6 * EPOCHS


def test_the_last_checkpoint_is_a_local_file() -> None:
    assert LastCheckpoint("~/run").path == Path.home() / "run" / "last.ckpt"
    with pytest.raises(OptionsError, match="dirpath='s3://bucket/run': must be a local folder"):
        LastCheckpoint("s3://bucket/run")


@pytest.mark.parametrize("steps", [1, 5, 6, 7, 12, 13])
def test_a_checkpoint_within_an_epoch_resumes_exactly(tmp_path: Path, steps: int) -> None:
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "part", last={"every_n_train_steps": 1}, max_steps=steps)
    after = fit(tmp_path / "part", resume=tmp_path / "part" / "last.ckpt")
    assert after.batches[-1] == whole.batches[-1]
    assert torch.equal(after.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("last", [{"train_time_interval": 0}, {"train_time_interval": -1}, {"every_n_train_steps": 0}])
def test_invalid_intervals_are_refused(tmp_path: Path, last: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match="must be"):
        LastCheckpoint(tmp_path, **last)


def test_a_better_checkpoint_of_an_earlier_run_is_not_replaced(tmp_path: Path) -> None:
    fit(tmp_path)
    best = (tmp_path / "best.ckpt").read_bytes()

    class Worse(Recorder):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val/loss", torch.tensor(1e9), on_epoch=True)

    torch.manual_seed(2)
    checkpoint = BestCheckpoint(tmp_path, "best", monitor="val/loss", enable_version_counter=False)
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=[checkpoint])
    trainer.fit(Worse())
    assert (tmp_path / "best.ckpt").read_bytes() == best
    assert checkpoint.best_model_path == str(tmp_path / "best.ckpt")


class Diverges(Recorder):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.global_step >= 8 else loss


def diverging(folder: Path, action: Any) -> Trainer:
    torch.manual_seed(1)
    callbacks = [NonFiniteLoss(action), LastCheckpoint(folder)]
    trainer = Trainer(accelerator="cpu", max_epochs=2, logger=False, callbacks=callbacks, enable_progress_bar=False)
    trainer.fit(Diverges())
    return trainer


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    message = r"loss is nan at step 9, batch 2 of epoch 1. The last checkpoint with finite weights is kept as .*_finite"
    with pytest.raises(NonFiniteError, match=message):
        diverging(tmp_path, "stop")
    checkpoint = torch.load(tmp_path / "last_finite.ckpt", weights_only=True)
    assert checkpoint["global_step"] == BATCHES
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())


def test_a_loss_that_is_not_finite_can_warn(tmp_path: Path) -> None:
    with pytest.warns(LitOrtWarning, match="nan at step 9.*Training continues") as caught:
        trainer = diverging(tmp_path, "warn")
    assert len([w for w in caught if issubclass(w.category, LitOrtWarning)]) == 1
    assert trainer.global_step == 2 * BATCHES
    assert torch.load(tmp_path / "last_finite.ckpt", weights_only=True)["global_step"] == BATCHES


def test_another_action_is_refused() -> None:
    with pytest.raises(OptionsError, match="action='explode' .*: choose from stop, warn"):
        NonFiniteLoss("explode")  # pyright: ignore[reportArgumentType]
