"""Loaders under a Trainer's options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lit_ort_tasks.data.loaders import Shuffled, evaluation_loader, training_loader
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Records(LightningModule):
    """Keeps the items of each training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.epochs: list[list[list[float]]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.epochs[-1].append(batch[0].flatten().tolist())
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def train_dataloader(self) -> Any:
        return training_loader(Shuffled(TensorDataset(torch.arange(20.0)[:, None]), seed=1), 2, self.trainer)

    def val_dataloader(self) -> Any:
        return evaluation_loader(Shuffled(TensorDataset(torch.arange(20.0)[:, None]), None), 2, self.trainer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def epochs_of(**options: Any) -> list[list[list[float]]]:
    module = Records()
    settings = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    Trainer(accelerator="cpu", max_epochs=3, num_sanity_val_steps=0, **settings, **options).fit(module)
    return module.epochs


@pytest.mark.parametrize("batches", [3, 0.3])
def test_overfitting_repeats_the_first_batches_of_the_first_epoch(batches: float) -> None:
    first, *others = epochs_of(overfit_batches=batches)
    assert others == [first, first]
    shuffled = epochs_of(limit_train_batches=3)
    assert shuffled[0] == first
    assert shuffled[1] != first
