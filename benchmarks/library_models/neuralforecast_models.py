"""Models of neuralforecast: forecasts of monthly series, trained by steps on sampled windows."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import logging
from typing import Any

import neuralforecast.models
import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import MQLoss
from torch import nn

from benchmarks.library_models.library import Fit, Models


def _panel() -> pd.DataFrame:
    draws, months = np.random.default_rng(0), np.arange(160)
    frames = []
    for number in range(16):
        values = 10 + np.sin(2 * np.pi * (months + number) / 12) + draws.normal(0, 0.1, len(months))
        dates = pd.date_range("2010-01-31", periods=len(months), freq="ME")
        frames.append(pd.DataFrame({"unique_id": f"series {number}", "ds": dates, "y": values}))
    return pd.concat(frames, ignore_index=True)


def _train(fit: Fit, name: str, loss: Any = None, **options: Any) -> nn.Module:
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    if loss is not None:
        options["loss"] = loss()
    model = getattr(neuralforecast.models, name)(
        h=12,
        input_size=36,
        max_steps=fit.steps,
        val_check_steps=20,
        random_seed=1,
        **options,
        **fit.quiet_options,
    )
    forecasts = NeuralForecast(models=[model], freq="ME")
    forecasts.fit(df=_panel(), val_size=12)
    return forecasts.models[0]


def _of(name: str, **options: Any) -> Any:
    return functools.partial(_train, name=name, **options)


MODELS: Models = {
    "MLP": _of("MLP"),
    "N-HiTS": _of("NHITS", loss=functools.partial(MQLoss, level=[80])),
    "N-BEATS": _of("NBEATS"),
    "LSTM": _of("LSTM"),
    "DLinear": _of("DLinear"),
    "TFT": _of("TFT", dropout=0.0, hidden_size=32),
    "iTransformer": _of("iTransformer", n_series=16, dropout=0.0, hidden_size=64),
    "TCN": _of("TCN"),
}
