"""Models of pytorch-forecasting: forecasts of a panel of series with covariates."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
import pytorch_forecasting as library
from lightning import pytorch as pl
from pytorch_forecasting import TimeSeriesDataSet
from pytorch_forecasting.metrics import MAE, NormalDistributionLoss, QuantileLoss
from torch import nn

from benchmarks.library_models.library import Fit, Models

_BATCH, _SERIES, _MONTHS = 64, 40, 60


@functools.cache
def _panel() -> pd.DataFrame:
    draws, months = np.random.default_rng(0), np.arange(_MONTHS)
    frames = []
    for number in range(_SERIES):
        price = 10 + draws.normal(0, 0.5, _MONTHS)
        season = np.sin(2 * np.pi * (months + number) / 12)
        volume = np.exp(2 + draws.normal() + 0.3 * season - 0.1 * (price - 10) + draws.normal(0, 0.1, _MONTHS))
        columns = {"month": months, "shop": f"shop {number % 8}", "item": f"item {number // 8}", "price": price}
        frames.append(pd.DataFrame({**columns, "season": (months % 12).astype(str), "volume": volume}))
    return pd.concat(frames, ignore_index=True)


def _data(
    is_plain: bool, has_relative_time: bool, lengths: tuple[int, int]
) -> tuple[TimeSeriesDataSet, TimeSeriesDataSet]:
    panel = _panel()
    covariates: dict[str, Any] = {}
    if not is_plain:
        covariates = {
            "static_categoricals": ["shop", "item"],
            "time_varying_known_reals": ["price"],
            # TiDE refuses it.
            "add_relative_time_idx": has_relative_time,
        }
    training = TimeSeriesDataSet(
        panel[panel.month < 54],
        time_idx="month",
        target="volume",
        group_ids=["shop", "item"],
        min_encoder_length=lengths[0],
        max_encoder_length=lengths[1],
        min_prediction_length=6,
        max_prediction_length=6,
        time_varying_unknown_reals=["volume"],
        target_normalizer=library.GroupNormalizer(groups=["shop", "item"]),
        **covariates,
    )
    return training, TimeSeriesDataSet.from_dataset(training, panel, min_prediction_idx=54)


def _train(
    fit: Fit, name: str, is_plain: bool = False, lengths: tuple[int, int] = (24, 24), loss: Any = None, **options: Any
) -> nn.Module:
    pl.seed_everything(0, verbose=False)
    training, validation = _data(is_plain, name != "TiDEModel", lengths)
    if loss is not None:
        options["loss"] = loss()
    module = getattr(library, name, None) or getattr(library.models, name)
    module = module.from_dataset(training, learning_rate=1e-3, **options)
    trainer = pl.Trainer(
        **fit.quiet_options,
        max_epochs=fit.epochs,
        limit_train_batches=20,
        limit_val_batches=4,
        gradient_clip_val=0.1,
    )
    trainer.fit(
        module,
        training.to_dataloader(train=True, batch_size=_BATCH, num_workers=0),
        validation.to_dataloader(train=False, batch_size=_BATCH, num_workers=0),
    )
    return module


def _of(name: str, **options: Any) -> Any:
    return functools.partial(_train, name=name, **options)


MODELS: Models = {
    "N-BEATS": _of("NBeats", is_plain=True, dropout=0.0),
    "N-HiTS": _of("NHiTS", is_plain=True, dropout=0.0),
    "DecoderMLP": _of("DecoderMLP", dropout=0.0, loss=QuantileLoss),
    "LSTM": _of("RecurrentNetwork", dropout=0.0, cell_type="LSTM"),
    "DeepAR": _of("DeepAR", dropout=0.0, loss=NormalDistributionLoss),
    "TFT": _of("TemporalFusionTransformer", dropout=0.0, loss=QuantileLoss),
    "TFT of all lengths": _of("TemporalFusionTransformer", dropout=0.0, lengths=(8, 24), loss=QuantileLoss),
    "TiDE": _of("TiDEModel", dropout=0.0, loss=MAE),
}
