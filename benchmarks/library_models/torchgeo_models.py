"""Tasks of torchgeo: classes, pixels and numbers of satellite images."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning import pytorch as pl
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchgeo import trainers

from benchmarks.library_models.library import Fit, Models

_CHANNELS, _CLASSES, _BATCH, _SIZE = 4, 5, 8, 64


class _Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int, target: Callable[[torch.Generator], dict[str, Tensor]]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._samples = [
            {"image": torch.randn(_CHANNELS, _SIZE, _SIZE, generator=generator), **target(generator)}
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index]


def _label(generator: torch.Generator) -> dict[str, Tensor]:
    return {"label": torch.randint(_CLASSES, (), generator=generator)}


def _several(generator: torch.Generator) -> dict[str, Tensor]:
    return {"label": torch.randint(2, (_CLASSES,), generator=generator)}


def _number(generator: torch.Generator) -> dict[str, Tensor]:
    return {"label": torch.randn(1, generator=generator)}


def _mask(generator: torch.Generator) -> dict[str, Tensor]:
    return {"mask": torch.randint(_CLASSES, (_SIZE, _SIZE), generator=generator)}


def _height(generator: torch.Generator) -> dict[str, Tensor]:
    return {"mask": torch.randn(_SIZE, _SIZE, generator=generator)}


def _train(fit: Fit, make: Callable[..., Any], target: Any, **options: Any) -> nn.Module:
    pl.seed_everything(0, verbose=False)
    module = make(weights=None, in_channels=_CHANNELS, **options)
    training, validation = (
        DataLoader(_Samples(count * _BATCH, seed, target), batch_size=_BATCH) for count, seed in ((20, 0), (2, 1))
    )
    pl.Trainer(**fit.quiet_options, max_epochs=fit.epochs).fit(module, training, validation)
    return module


def _of(name: str, target: Any, **options: Any) -> Any:
    return functools.partial(_train, make=getattr(trainers, name), target=target, **options)


_SEGMENTATION = {"backbone": "resnet18", "num_classes": _CLASSES}
MODELS: Models = {
    "classification, ResNet-18": _of("ClassificationTask", _label, model="resnet18", num_classes=_CLASSES),
    "several classes, ResNet-18": _of(
        "ClassificationTask", _several, model="resnet18", task="multilabel", num_labels=_CLASSES, loss="bce"
    ),
    "regression, ResNet-18": _of("RegressionTask", _number, model="resnet18", num_outputs=1),
    "segmentation, U-Net": _of("SemanticSegmentationTask", _mask, model="unet", **_SEGMENTATION),
    "segmentation, U-Net, Jaccard": _of(
        "SemanticSegmentationTask", _mask, model="unet", loss="jaccard", **_SEGMENTATION
    ),
    "segmentation, DeepLabV3+": _of(
        "SemanticSegmentationTask", _mask, model="deeplabv3+", loss="focal", **_SEGMENTATION
    ),
    "pixelwise regression, U-Net": _of("PixelwiseRegressionTask", _height, model="unet", backbone="resnet18"),
}
