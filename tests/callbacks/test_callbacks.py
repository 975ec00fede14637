"""The callbacks for step statistics and the progress bar, and the functions that measure memory."""

from __future__ import annotations

import gc
import mmap
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from lit_ort.callbacks import (
    LastCheckpoint,
    NonFiniteLoss,
    OneLineProgressBar,
    StepStatistics,
    first_dimension,
    peak_rss_bytes,
    reset_peak_rss,
    short_figure,
    short_name,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STEP_S, VALIDATION_S, FIRST_S = 0.01, 0.2, 0.15
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the peak can be reset on Linux only")


def batches(count: int) -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, 3 * count), batch_size=3)


class SlowModel(BoringModel):
    """Steps of a known duration; the first step takes longer, a validation step much longer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(FIRST_S if self.trainer.global_step == 0 else STEP_S)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(VALIDATION_S)
        return super().validation_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return batches(24)

    def val_dataloader(self) -> Any:
        return batches(1)

    def test_dataloader(self) -> Any:
        return batches(1)


def fit(statistics: StepStatistics, folder: Path, library: Any = lightning.pytorch, **options: Any) -> Any:
    trainer = library.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        callbacks=[statistics],
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"max_epochs": 1, "logger": False, "enable_progress_bar": False, "log_every_n_steps": 4} | options,
    )
    trainer.fit(SlowModel())
    return trainer


@pytest.mark.slow
def test_the_time_of_a_batch_excludes_validation_and_the_first_step(tmp_path: Path) -> None:
    statistics = StepStatistics()
    fit(statistics, tmp_path, val_check_interval=6)
    summary = statistics.summary()
    assert summary.steps == 24
    assert summary.first_step_s is not None
    assert summary.first_step_s >= FIRST_S
    assert summary.step_ms_median is not None
    assert summary.step_ms_mean is not None
    assert 1e3 * STEP_S <= summary.step_ms_median < 3e3 * STEP_S
    # Four validations between 23 batches would add 35 ms to each.
    assert summary.step_ms_mean < 1e3 * (STEP_S + 4 * VALIDATION_S / 23)


def test_the_rate_is_items_per_second(tmp_path: Path) -> None:
    statistics = StepStatistics(item="numbers", count_items=lambda batch: batch.numel())
    trainer = fit(statistics, tmp_path, limit_val_batches=0)
    summary = statistics.summary()
    assert summary.item == "numbers"
    assert summary.items_per_s is not None
    assert summary.step_ms_median is not None
    assert summary.items_per_s == pytest.approx(96e3 / summary.step_ms_median, rel=1e-6)
    assert trainer.callback_metrics["speed/numbers_per_s"].item() == pytest.approx(summary.items_per_s, rel=0.5)


def test_measurements_are_logged_at_the_steps_of_the_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    fit(StepStatistics(window=2), tmp_path, logger=logger, limit_val_batches=0)
    header, *lines = (tmp_path / "metrics.csv").read_text().splitlines()
    values = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    assert [int(row["step"]) for row in values] == [3, 7, 11, 15, 19, 23]
    for row in values:
        assert float(row["speed/step_ms"]) >= 1e3 * STEP_S
        assert float(row["speed/samples_per_s"]) < 3 / STEP_S


def test_a_trainer_that_logs_no_step(tmp_path: Path) -> None:
    trainer = fit(StepStatistics(), tmp_path, limit_val_batches=0, log_every_n_steps=0)
    assert trainer.callback_metrics["speed/step_ms"] > 0


def test_a_second_fit_starts_from_zero(tmp_path: Path) -> None:
    statistics = StepStatistics()
    fit(statistics, tmp_path, limit_val_batches=0, limit_train_batches=6)
    fit(statistics, tmp_path, limit_val_batches=0, limit_train_batches=4)
    assert statistics.summary().steps == 4


def test_the_strategys_setup_is_part_of_the_first_step(tmp_path: Path) -> None:
    class SlowSetup(SingleDeviceStrategy):
        def setup(self, trainer: Any) -> None:
            time.sleep(0.3)
            super().setup(trainer)

    statistics = StepStatistics()
    fit(statistics, tmp_path, strategy=SlowSetup("cpu"), limit_val_batches=0, limit_train_batches=2)
    first_step_s = statistics.summary().first_step_s
    assert first_step_s is not None
    assert first_step_s >= FIRST_S + 0.3


def test_a_test_run_keeps_the_measurements_of_the_fit(tmp_path: Path) -> None:
    statistics = StepStatistics()
    trainer = fit(statistics, tmp_path, limit_val_batches=0, limit_train_batches=4)
    trainer.test(SlowModel(), verbose=False)
    assert statistics.summary().steps == 4


def test_one_step_has_no_median(tmp_path: Path) -> None:
    statistics = StepStatistics()
    fit(statistics, tmp_path, limit_val_batches=0, limit_train_batches=1, log_every_n_steps=1)
    summary = statistics.summary()
    assert summary.steps == 1
    assert summary.first_step_s is not None
    assert summary.step_ms_median is summary.step_ms_mean is summary.items_per_s is None


def test_it_works_with_pytorch_lightning(tmp_path: Path) -> None:
    class Model(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    statistics = StepStatistics()
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        callbacks=[statistics],  # pyright: ignore[reportArgumentType]
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=1,
        log_every_n_steps=4,
    )
    trainer.fit(Model(), batches(8))
    assert statistics.summary().steps == 8
    assert "speed/step_ms" in trainer.callback_metrics


def test_pytorch_lightning_takes_them_for_its_own(tmp_path: Path) -> None:
    own: list[Any] = [OneLineProgressBar(), LastCheckpoint(tmp_path), NonFiniteLoss(), StepStatistics()]
    trainer = pytorch_lightning.Trainer(default_root_dir=tmp_path, callbacks=own, logger=False, accelerator="cpu")
    # It would add its own progress bar and its own checkpoint.
    assert trainer.progress_bar_callback is own[0]
    assert trainer.checkpoint_callbacks == [own[1]]
    assert all(isinstance(callback, pytorch_lightning.Callback) for callback in own)


@ON_LINUX
def test_the_peak_includes_freed_memory_and_can_be_reset() -> None:
    # Garbage that is freed during the test would hide the block, and so would memory that the C library keeps.
    gc.collect()
    assert reset_peak_rss()
    start = peak_rss_bytes()
    with mmap.mmap(-1, 64 * 2**20) as block:
        for _ in range(64):
            block.write(bytes(2**20))
    peak = peak_rss_bytes()
    assert start is not None
    assert peak is not None
    assert 60 * 2**20 < peak - start < 100 * 2**20
    assert reset_peak_rss()
    after = peak_rss_bytes()
    assert after is not None
    assert after < peak - 50 * 2**20


@ON_LINUX
def test_the_summary_has_the_memory_above_the_start_of_fit(tmp_path: Path) -> None:
    class Allocating(StepStatistics):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            # mmap, because malloc could reuse memory that the C library keeps from other tests.
            with mmap.mmap(-1, 128 * 2**20) as memory:
                memory.write(b"1" * len(memory))

    statistics = Allocating()
    fit(statistics, tmp_path, limit_val_batches=0, limit_train_batches=2, log_every_n_steps=1)
    summary = statistics.summary()
    assert summary.peak_mib is not None
    assert summary.peak_above_start_mib is not None
    assert 120 < summary.peak_above_start_mib < 300
    assert summary.peak_mib > summary.peak_above_start_mib


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(3, 2), 3),
        (torch.zeros(()), 1),
        ((torch.zeros(4, 2), torch.zeros(5)), 4),
        ({"text": ["a"], "ids": torch.zeros(6, 2)}, 6),
        (BatchEncoding({"ids": torch.zeros(5, 2)}), 5),
        (["a", 3], 0),
    ],
)
def test_first_dimension(batch: Any, count: int) -> None:
    assert first_dimension(batch) == count


def test_a_window_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match="window=0: must be at least 1"):
        StepStatistics(window=0)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("train/loss", "loss"),
        ("val/ppl", "val_ppl"),
        ("speed/step_ms", "ms"),
        ("speed/tokens_per_s", "tokens/s"),
        ("acc", "acc"),
        ("train", "train"),
    ],
)
def test_short_name(name: str, short: str) -> None:
    assert short_name(name) == short


@pytest.mark.parametrize(("value", "short"), [(6.7741, "6.77"), (873.4, "873"), (28782.0, "28782"), (7, 7)])
def test_short_figure(value: Any, short: Any) -> None:
    assert short_figure(value) == short


class Endless(torch.utils.data.IterableDataset[torch.Tensor]):
    """Batches of an unknown number."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(batches(24))


@pytest.mark.parametrize("data", [batches(24), Endless()], ids=["known length", "unknown length"])
def test_the_bar_shows_speed_on_one_line_per_epoch(
    data: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = dict(callbacks=[StepStatistics(), OneLineProgressBar()], logger=False, max_epochs=2)
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
        log_every_n_steps=4,
        **options,
    )
    trainer.fit(SlowModel(), data)
    # tqdm writes to either stream; of the texts between carriage returns, the last one stays on the screen.
    captured = capfd.readouterr()
    last = [line.rsplit("\r", 1)[-1] for line in (captured.out + captured.err).split("\n")]
    lines = [line for line in last if line.strip()]
    assert [line.split(":")[0] for line in lines] == ["Epoch 0", "Epoch 1"]
    assert all("ms=" in line and "samples/s=" in line for line in lines)
    assert "v_num" not in captured.out + captured.err


def test_the_first_epoch_after_a_sanity_check_has_a_bar(tmp_path: Path) -> None:
    shown: list[bool] = []

    class RecordingBar(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            shown.append(not trainer.progress_bar_callback.train_progress_bar.disable)

    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        callbacks=[OneLineProgressBar(), RecordingBar()],
        logger=False,
        max_epochs=2,
        limit_train_batches=2,
        limit_val_batches=1,
        num_sanity_val_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert shown == [True] * 4
