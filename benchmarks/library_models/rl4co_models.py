"""Models of rl4co: policies that construct tours, learned by their rewards."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from typing import Any

from lightning import pytorch as pl
from rl4co.envs import CVRPEnv, TSPEnv
from rl4co.models import POMO, AttentionModel, AttentionModelPolicy
from torch import nn

from benchmarks.library_models.library import Fit, Models

_BATCH, _LOCATIONS = 64, 10


def _train(fit: Fit, model: Any, env: Any, **options: Any) -> nn.Module:
    pl.seed_everything(0, verbose=False)
    environment = env(generator_params={"num_loc": _LOCATIONS})
    policy = AttentionModelPolicy(env_name=environment.name, embed_dim=64, num_encoder_layers=2, num_heads=4)
    sizes = {"train_data_size": 20 * _BATCH, "val_data_size": 2 * _BATCH, "test_data_size": _BATCH}
    module = model(environment, policy=policy, batch_size=_BATCH, **sizes, **options)
    pl.Trainer(**fit.quiet_options, max_epochs=fit.epochs).fit(module)
    return module


MODELS: Models = {
    "attention model, TSP": functools.partial(_train, model=AttentionModel, env=TSPEnv, baseline="exponential"),
    "attention model, CVRP": functools.partial(_train, model=AttentionModel, env=CVRPEnv, baseline="exponential"),
    "POMO, TSP": functools.partial(_train, model=POMO, env=TSPEnv, num_augment=0),
}
