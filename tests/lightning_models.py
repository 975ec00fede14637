"""A small LightningModule that uses what users use, and a quiet Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH = 40, 8


class Net(LightningModule):
    """A classifier that logs in every way, with two parameter groups and a schedule."""

    def __init__(self, dropout: float = 0.0, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(16))
        self.head = nn.Linear(16, 4)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": (logits.argmax(-1) == y).float().mean(), "double": loss * 2})
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(-1)

    def configure_optimizers(self) -> Any:
        rate = self.hparams["learning_rate"]
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": rate / 2}]
        optimizer = torch.optim.SGD(groups, rate, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)}


class OwnLog(Net):
    """Has code of its own where it logs, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.names: list[str] = []

    def log(self, name: str, value: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.names.append(name)
        super().log(name, value * self.scale, **kwargs)


class Branching(Net):
    """Looks at its counters, and logs more at some steps."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 3 == 0:
            self.log("third", loss)
        if self.global_step >= 4:
            self.log("late", loss.detach() + 1)
        return loss * (1 + self.global_step / 100)


def loader(rows: int = ROWS, batch: int = BATCH) -> DataLoader[Any]:
    """Fixed data; the last batch is shorter where `batch` doesn't divide `rows`."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 6, generator=generator)
    y = torch.randint(4, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch)


def constant_loader(batches: int = 5) -> DataLoader[Any]:
    """The same batch again and again: Lightning starts an epoch's data anew when it resumes in its middle."""
    x, y = next(iter(loader()))
    return DataLoader(TensorDataset(x.repeat(batches, 1), y.repeat(batches)), BATCH)


def trainer(strategy: Any, folder: Path | None = None, **settings: Any) -> Trainer:
    """A Trainer without output; with `folder` it may write checkpoints there."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": folder is not None,
        "default_root_dir": folder,
    }
    return Trainer(strategy=strategy, **{**quiet, **settings})


def assert_same_weights(found: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, a), b in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        a, b = a.double(), b.double()
        assert float((a - b).norm()) <= tolerance * float(b.norm().clamp_min(1e-3)), name
