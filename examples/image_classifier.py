"""Classify drawn shapes with a small convolutional network: datamodule, metrics, checkpoint and early stopping.

    python examples/image_classifier.py --strategy ort

The module is plain Lightning code. Only `strategy=` changes between eager PyTorch and ONNX Runtime.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Accuracy

import lit_ort  # registers strategy="ort"

CLASSES = ("circle", "square", "triangle")
SIZE = 32
STRATEGIES = {"eager": "auto", "ort": "ort"}
Batch = tuple[Tensor, Tensor]


def draw(count: int, generator: torch.Generator) -> TensorDataset:
    """Return float32[count, 1, SIZE, SIZE] images of shapes at random positions and sizes, with noise, and labels."""
    labels = torch.randint(len(CLASSES), (count,), generator=generator)
    radius = torch.empty(count, 1, 1).uniform_(5, 10, generator=generator)
    center = torch.empty(2, count, 1, 1).uniform_(11, SIZE - 11, generator=generator)
    axis = torch.arange(SIZE, dtype=torch.float32)
    x, y = axis - center[0], axis[:, None] - center[1]  # each [count, SIZE, SIZE]
    circle = x**2 + y**2 < radius**2
    square = torch.maximum(x.abs(), y.abs()) < 0.9 * radius
    triangle = (y < 0.8 * radius) & (y > 2 * x.abs() - radius)
    shapes = torch.stack([circle, square, triangle])[labels, torch.arange(count)]
    noise = 0.4 * torch.randn(count, SIZE, SIZE, generator=generator)
    return TensorDataset((shapes.float() + noise).unsqueeze(1), labels)


class Shapes(LightningDataModule):
    """3,000 training and 600 validation images, drawn again in each run from the same seed."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images = draw(3_600, torch.Generator().manual_seed(0))
        self.train, self.val = random_split(images, [3_000, 600], torch.Generator().manual_seed(1))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, self.batch_size)


class ShapeClassifier(LightningModule):
    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        channels = (1, width, 2 * width, 4 * width)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in zip(channels, channels[1:], strict=False)
        ]
        self.net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, len(CLASSES)))
        self.accuracy = Accuracy(task="multiclass", num_classes=len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ort")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ModelCheckpoint(folder, monitor="val_accuracy", mode="max")
        trainer = Trainer(
            strategy=STRATEGIES[args.strategy],
            accelerator="cpu",
            max_epochs=args.epochs,
            callbacks=[checkpoint, EarlyStopping("val_accuracy", mode="max", patience=2)],
            logger=False,
        )
        trainer.fit(ShapeClassifier(), Shapes())
        best = ShapeClassifier.load_from_checkpoint(checkpoint.best_model_path)
        trainer.validate(best, Shapes(), verbose=False)

    print(f"validation accuracy {float(trainer.callback_metrics['val_accuracy']):.3f} (chance: 0.333)")
    if args.strategy == "ort":
        print(lit_ort.explain(trainer))


if __name__ == "__main__":
    main()
