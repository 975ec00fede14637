"""Models of pytorch-tabular: classes of rows with numbers and categories."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel, models
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from torch import nn

from benchmarks.library_models.library import Fit, Models

_NUMBERS, _CATEGORIES, _BATCH = 8, 3, 64


def _rows(count: int, seed: int) -> pd.DataFrame:
    draws = np.random.default_rng(seed)
    columns: dict[str, Any] = {f"number {k}": draws.standard_normal(count) for k in range(_NUMBERS)}
    columns |= {f"category {k}": draws.integers(0, 5, count).astype(str) for k in range(_CATEGORIES)}
    score = columns["number 0"] + 0.5 * columns["number 1"] * (columns["category 0"] == "1")
    return pd.DataFrame({**columns, "label": (score > 0).astype(int)})


def _train(fit: Fit, config: str, **options: Any) -> nn.Module:
    trainer = TrainerConfig(
        batch_size=_BATCH,
        max_epochs=fit.epochs,
        accelerator="cpu",
        devices=1,
        early_stopping=None,
        checkpoints=None,
        load_best=False,
        progress_bar="none",
        seed=0,
        trainer_kwargs={"strategy": fit.strategy, "enable_model_summary": False},
    )
    names = [f"number {k}" for k in range(_NUMBERS)], [f"category {k}" for k in range(_CATEGORIES)]
    model = TabularModel(
        data_config=DataConfig(target=["label"], continuous_cols=names[0], categorical_cols=names[1]),
        model_config=getattr(models, config)(task="classification", **options),
        optimizer_config=OptimizerConfig(),
        trainer_config=trainer,
        verbose=False,
    )
    model.fit(train=_rows(20 * _BATCH, 0), validation=_rows(256, 1), callbacks=fit.callbacks)
    return model.model


def _of(config: str, **options: Any) -> Any:
    return functools.partial(_train, config=config, **options)


_NO_DROPOUT = {"attn_dropout": 0.0, "add_norm_dropout": 0.0, "ff_dropout": 0.0, "embedding_dropout": 0.0}
MODELS: Models = {
    "category embedding": _of("CategoryEmbeddingModelConfig", layers="128-64-32"),
    "TabTransformer": _of("TabTransformerConfig", **_NO_DROPOUT),
    "FT-Transformer": _of("FTTransformerConfig", **_NO_DROPOUT),
    "GANDALF": _of("GANDALFConfig"),
}
