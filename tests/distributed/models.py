"""A small module with pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_ort import Pipeline


def hidden_stage(inputs: int, outputs: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.GELU(), nn.LayerNorm(outputs), nn.Dropout(dropout))


def normalized_stage(inputs: int, outputs: int, dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, inputs), nn.GELU(), nn.BatchNorm1d(inputs), nn.Linear(inputs, outputs))


def frozen_stage(inputs: int, outputs: int, dropout: float) -> nn.Module:
    return hidden_stage(inputs, outputs, dropout).requires_grad_(False)


def last_stage(inputs: int, outputs: int, dropout: float) -> nn.Module:
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(inputs, outputs))


class Staged(LightningModule):
    """A classifier with a pipeline of `stages` stages.

    Args:
        stages: the number of stages.
        optimizer: makes the optimizer.
        dropout: the drop probability.
        first, last: make the first and the last stage from the numbers of inputs and outputs and the drop probability.
        loss: the loss of the pipeline.
    """

    def __init__(
        self,
        stages: int = 2,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        dropout: float = 0.0,
        first: Callable[[int, int, float], nn.Module] = hidden_stage,
        last: Callable[[int, int, float], nn.Module] = last_stage,
        loss: Callable[..., Tensor] = F.cross_entropy,
    ) -> None:
        super().__init__()
        self.count = stages
        self.dropout = dropout
        # A loss that is a module is a part of the pipeline alone.
        self.parts = (first, last, loss)
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.pipeline: Pipeline | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.pipeline is None:
            middle = [partial(hidden_stage, 16, 16)] * (self.count - 2)
            first, last, loss = self.parts
            stages = [partial(first, 6, 16, self.dropout), *middle, partial(last, 16, 4, self.dropout)]
            self.pipeline = Pipeline(stages, loss)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        assert self.pipeline is not None
        loss = self.pipeline(*batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        assert self.pipeline is not None
        self.log("val_loss", self.pipeline(*batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        optimizer = self.optimizer([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]
