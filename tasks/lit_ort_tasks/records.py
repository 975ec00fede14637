"""Records of a run in its loggers besides the curves: hyperparameters with readable names, and the final figures.

TensorBoard shows both in its HPARAMS tab. Only the start and the end of a run are written for the tab, which then lists
the hyperparameters and figures of all runs, those that differ between runs first. `TensorBoardLogger.log_hyperparams`
also writes a description of the experiment, with which the tab lists those of a single run in alphabetical order.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch.utils.tensorboard.summary import hparams

Scalar = str | int | float | bool

# Groups of the configuration whose choice is a hyperparameter.
CHOICES = ("strategy", "task", "data", "optimizer", "scheduler")
# Names of hyperparameters, with their keys in the configuration.
VALUES = {"lr": "optimizer.lr", "batch_size": "data.batch_size", "precision": "precision", "seed": "seed"}
# Of the `steps` in results.json, those by which runs are compared.
STEP_FIGURES = ("step_ms_median", "peak_mib")


def hyperparameters(
    config: DictConfig, choices: Mapping[str, str | None], overrides: Sequence[str]
) -> dict[str, Scalar]:
    """The hyperparameters by which runs are compared.

    Args:
        config: composed.
        choices: of each group of the configuration.
        overrides: of the command line. Those that set a number or a truth value are hyperparameters, under their keys.
    """
    values: dict[str, Any] = {name: choices.get(name) for name in CHOICES}
    values |= {name: OmegaConf.select(config, key) for name, key in VALUES.items()}
    keys = [override.lstrip("+").partition("=")[0] for override in overrides if not override.startswith("~")]
    for key in keys:
        value = OmegaConf.select(config, key)
        if key not in VALUES.values() and isinstance(value, (int, float)):
            values[key] = value
    return {name: value for name, value in values.items() if isinstance(value, Scalar)}


def final_figures(results: Mapping[str, Any]) -> dict[str, float]:
    """The figures of results.json by which runs are compared: of the test, of the last validation, time, memory.

    Their group, `end/`, is the first one in the tab, which shows the first five figures unless others are selected.
    Figures that are not finite are left out.
    """
    metrics, steps = results["metrics"], results["steps"] or {}
    headline = [f"val/{name}" for name in results["headline"]]
    figures = {name.replace("/", "_"): value for name, value in metrics.items() if name.startswith("test/")}
    figures |= {name.replace("/", "_"): metrics.get(name) for name in headline}
    figures |= {name: steps.get(name) for name in STEP_FIGURES}
    return {f"end/{name}": value for name, value in figures.items() if value is not None}


@rank_zero_only
def record_start(trainer: Trainer, config: DictConfig, parameters: Mapping[str, Scalar]) -> None:
    """Passes the hyperparameters to every logger, and the composed configuration under the name `config`."""
    whole = OmegaConf.to_container(config, resolve=True)
    for logger in trainer.loggers:
        logger.log_hyperparams({**parameters, "config": whole})
        if isinstance(logger, TensorBoardLogger):
            _, start, _ = hparams(dict(parameters), {})
            _write(logger, start)


@rank_zero_only
def record_end(trainer: Trainer, figures: Mapping[str, float]) -> None:
    """Passes the final figures to every logger."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(figures), step=trainer.global_step)
        if isinstance(logger, TensorBoardLogger):
            _, _, end = hparams({}, {})
            _write(logger, end)
        logger.finalize("success")


def _write(logger: TensorBoardLogger, summary: Any) -> None:
    # After `finalize` there is no writer until a scalar is logged.
    writer = logger.experiment.file_writer
    assert writer is not None
    writer.add_summary(summary)


def finish_wandb(exit_code: int) -> None:
    """Ends the W&B run of this process, if there is one: the next run of a multirun begins another one."""
    wandb = sys.modules.get("wandb")
    if wandb is not None:
        wandb.finish(exit_code=exit_code)
