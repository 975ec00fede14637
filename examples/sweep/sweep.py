"""A sweep with Hydra: the width of a model and the strategy, one job for each combination.

    python examples/sweep/sweep.py                                               # one job, strategy=ort
    python examples/sweep/sweep.py -m model.width=32,128 strategy=eager,ort      # four jobs

The strategy is a group of `conf/`: `strategy/eager.yaml` and `strategy/ort.yaml`.
"""

from __future__ import annotations

import math
import time

import hydra
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer, seed_everything
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import accuracy

import lit_ort

TURNS = 1.75
Batch = tuple[Tensor, Tensor]


def spirals(count: int, seed: int) -> TensorDataset:
    """Return float32[count, 2] points of two interleaved spirals with noise, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    radius = torch.rand(count, generator=generator).sqrt()
    angle = 2 * math.pi * TURNS * radius + math.pi * labels
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return TensorDataset(points + 0.02 * torch.randn(count, 2, generator=generator), labels)


class Classifier(LightningModule):
    def __init__(self, width: int, layers: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        widths = (2, *[width] * layers)
        blocks = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in zip(widths, widths[1:], strict=False)]
        self.net = nn.Sequential(*blocks, nn.Linear(width, 2))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        points, labels = batch
        return F.cross_entropy(self.net(points), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        points, labels = batch
        self.log("accuracy", accuracy(self.net(points), labels, task="multiclass", num_classes=2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr, fused=True)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> float:
    seed_everything(config.seed, verbose=False)
    module: LightningModule = instantiate(config.model)
    trainer: Trainer = instantiate(config.trainer)
    train = DataLoader(spirals(8_192, seed=0), config.batch_size, shuffle=True)
    val = DataLoader(spirals(2_048, seed=1), config.batch_size)
    start = time.perf_counter()
    trainer.fit(module, train, val)
    seconds = time.perf_counter() - start

    score = trainer.callback_metrics["accuracy"].item()
    strategy = type(trainer.strategy).__name__
    print(f"width {config.model.width}, {strategy}: accuracy {score:.3f} (chance: 0.5), {seconds:.1f} s")
    if isinstance(trainer.strategy, lit_ort.ORTStrategy):
        print(lit_ort.explain(trainer))
    return score  # what a Hydra sweeper such as Optuna's maximizes


if __name__ == "__main__":
    main()
