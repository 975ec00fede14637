"""Models of darts (unit8co/darts): forecasts of hourly series with daily and weekly seasons."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import logging
from typing import Any

import darts.models
import numpy as np
import pandas as pd
from darts import TimeSeries
from darts.utils.likelihood_models.torch import GaussianLikelihood, QuantileRegression
from pytorch_lightning import seed_everything
from torch import nn

from benchmarks.library_models.library import Fit, Models

_CHUNKS = {"input_chunk_length": 48, "output_chunk_length": 12}
_WINDOWS = 20 * 32


def _series(components: int, length: int, seed: int) -> TimeSeries:
    draws, hours = np.random.default_rng(seed), np.arange(length)[:, None]
    phases = np.arange(components) + seed
    values = np.sin(hours * 2 * np.pi / 24 + phases) + 0.4 * np.sin(hours * 2 * np.pi / 168 + phases)
    values += 0.2 * draws.standard_normal(values.shape)
    times = pd.date_range("2024-01-01", periods=length, freq="h")
    return TimeSeries.from_times_and_values(times, values.astype(np.float32))


def _train(fit: Fit, name: str, components: int = 1, covariates: bool = False, **options: Any) -> nn.Module:
    seed_everything(0, verbose=False)
    logging.getLogger("darts").setLevel(logging.ERROR)
    arguments = {**_CHUNKS, **{key: value() if callable(value) else value for key, value in options.items()}}
    is_recurrent = name == "RNNModel"
    if is_recurrent:
        arguments |= {"input_chunk_length": 24, "training_length": 48}
        del arguments["output_chunk_length"]
    model = getattr(darts.models, name)(
        **arguments,
        batch_size=32,
        n_epochs=fit.epochs,
        random_state=0,
        log_tensorboard=False,
        pl_trainer_kwargs=fit.quiet_options,
    )
    # A window for each item of 20 batches.
    length = _WINDOWS + (48 if is_recurrent else 60) - 1
    data: dict[str, Any] = {"series": _series(components, length, 0), "val_series": _series(components, 200, 0)}
    if covariates:
        known = _series(2, length + 60, 1)
        data |= {"future_covariates": known, "val_future_covariates": known}
        if not is_recurrent:
            past = _series(2, length, 2)
            data |= {"past_covariates": past, "val_past_covariates": past}
    model.fit(**data, verbose=False)
    return model.model


def _of(name: str, **options: Any) -> Any:
    return functools.partial(_train, name=name, **options)


MODELS: Models = {
    "NLinear": _of("NLinearModel", components=3),
    "DLinear": _of("DLinearModel", components=3, covariates=True, likelihood=GaussianLikelihood),
    "TiDE": _of("TiDEModel", dropout=0.0),
    "TiDE with covariates": _of("TiDEModel", components=3, covariates=True, dropout=0.0, use_layer_norm=True),
    "N-BEATS": _of("NBEATSModel", generic_architecture=False, num_blocks=3),
    "N-HiTS": _of("NHiTSModel", dropout=0.0),
    "TCN": _of("TCNModel", dropout=0.0),
    "Transformer": _of("TransformerModel", dropout=0.0),
    "TFT": _of("TFTModel", dropout=0.0, add_relative_index=True),
    "TSMixer": _of("TSMixerModel", components=3, dropout=0.0, likelihood=QuantileRegression),
    "LSTM": _of("RNNModel", model="LSTM", hidden_dim=25, n_rnn_layers=2),
    "GRU with covariates": _of("RNNModel", model="GRU", hidden_dim=25, covariates=True),
    "block LSTM": _of("BlockRNNModel", model="LSTM", hidden_dim=25, n_rnn_layers=2),
}
