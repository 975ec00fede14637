"""Models of gluonts: probabilistic forecasts of hourly series."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
from gluonts import torch as library
from gluonts.dataset.common import ListDataset
from lightning.pytorch import seed_everything
from torch import nn

from benchmarks.library_models.library import Fit, Models


def _dataset() -> ListDataset:
    draws, hours = np.random.default_rng(0), np.arange(500)
    items = [
        {
            "start": pd.Period("2024-01-01", "h"),
            "target": 5 + np.sin(2 * np.pi * hours / 24) + draws.normal(0, 0.2, 500),
        }
        for _ in range(20)
    ]
    return ListDataset(items, freq="h")


def _train(fit: Fit, name: str, **options: Any) -> nn.Module:
    seed_everything(0, verbose=False)
    np.random.seed(0)
    if name in ("DeepAREstimator", "TemporalFusionTransformerEstimator"):
        options["freq"] = "h"
    # gluonts has a checkpoint of its own.
    trainer = {**fit.quiet_options, "enable_checkpointing": True, "max_epochs": fit.epochs}
    estimator = getattr(library, name)(
        prediction_length=24, context_length=48, num_batches_per_epoch=20, trainer_kwargs=trainer, **options
    )
    return estimator.train_model(_dataset()).trained_net


def _of(name: str, **options: Any) -> Any:
    return functools.partial(_train, name=name, **options)


MODELS: Models = {
    "feed-forward": _of("SimpleFeedForwardEstimator"),
    "DeepAR": _of("DeepAREstimator", dropout_rate=0.0),
    "PatchTST": _of("PatchTSTEstimator", patch_len=8, dropout=0.0),
    "DLinear": _of("DLinearEstimator"),
    "TFT": _of("TemporalFusionTransformerEstimator", dropout_rate=0.0),
    "Lag-TST": _of("LagTSTEstimator", freq="h", dropout=0.0),
}
