"""What the functions that train libraries' models share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


@dataclasses.dataclass(frozen=True)
class Fit:
    """What is the same in the fits of all models.

    Args:
        strategy: the Trainer's.
        callbacks: the Trainer's.
        epochs: the number of epochs, of 20 steps each unless the library decides otherwise.
    """

    strategy: str
    callbacks: list[Any]
    epochs: int

    @property
    def steps(self) -> int:
        """The number of steps, for libraries that count them."""
        return 20 * self.epochs

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of a Trainer, without its length."""
        return {
            "accelerator": "cpu",
            "devices": 1,
            "strategy": self.strategy,
            "callbacks": self.callbacks,
            "enable_progress_bar": False,
        }

    @property
    def quiet_options(self) -> dict[str, Any]:
        """The same, without files and tables."""
        return {**self.options, "logger": False, "enable_checkpointing": False, "enable_model_summary": False}


# Trains a new model, with dropout off, and returns its module.
Train = Callable[[Fit], nn.Module]
Models = Mapping[str, Train]
