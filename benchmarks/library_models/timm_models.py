"""Models of timm, in a LightningModule as its users write it: classes of images, with metrics beside the loss."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from typing import Any

import timm
import torch
import torchmetrics
from lightning import pytorch as pl
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.library_models.library import Fit, Models

_CLASSES, _BATCH, _SIZE = 10, 16, 64


class _Classifier(pl.LightningModule):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.model = timm.create_model(name, pretrained=False, num_classes=_CLASSES, **options)
        metrics = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.Accuracy("multiclass", num_classes=_CLASSES),
                "f1": torchmetrics.F1Score("multiclass", num_classes=_CLASSES, average="macro"),
            }
        )
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train_"), metrics.clone(prefix="val_")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.model(images)
        self.train_metrics(logits, labels)
        self.log_dict(self.train_metrics)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(images)
        self.val_metrics(logits, labels)
        self.log_dict(self.val_metrics)
        self.log("val_loss", F.cross_entropy(logits, labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def _images(batches: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    count = batches * _BATCH
    labels = torch.randint(_CLASSES, (count,), generator=generator)
    images = torch.randn(count, 3, _SIZE, _SIZE, generator=generator) + labels[:, None, None, None] / 10
    return DataLoader(TensorDataset(images, labels), batch_size=_BATCH)


def _train(fit: Fit, name: str, **options: Any) -> nn.Module:
    pl.seed_everything(0, verbose=False)
    module = _Classifier(name, **options)
    pl.Trainer(**fit.quiet_options, max_epochs=fit.epochs).fit(module, _images(20, 0), _images(2, 1))
    return module


MODELS: Models = {
    "ResNet-18": functools.partial(_train, name="resnet18"),
    "ViT, tiny": functools.partial(_train, name="vit_tiny_patch16_224", img_size=_SIZE, patch_size=8),
    "ConvNeXt, atto": functools.partial(_train, name="convnext_atto"),
    "EfficientNet-B0": functools.partial(_train, name="efficientnet_b0", drop_rate=0.0, drop_path_rate=0.0),
    "MobileNetV3, small": functools.partial(_train, name="mobilenetv3_small_100", drop_rate=0.0),
    "Swin, tiny": functools.partial(
        _train, name="swin_tiny_patch4_window7_224", img_size=_SIZE, window_size=4, drop_path_rate=0.0
    ),
}
