"""Stops or warns at the first step whose loss is NaN or infinite."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_ort.callbacks.checkpoint_callbacks import LastCheckpoint, values_in
from lit_ort.errors import LitOrtWarning, NonFiniteError, OptionsError
from lit_ort.files import whole_file

ACTIONS = ("stop", "warn")


class NonFiniteLoss(Callback):
    """Ends a run whose training loss is NaN or infinite, or warns once. A copy of the last finite checkpoint is kept.

    It reads the loss of every step, which synchronizes with a device that computes asynchronously.

    Args:
        action: `stop` or `warn`.

    Raises:
        OptionsError: another action.
        NonFiniteError: from `fit`, at the step, under `stop`.
    """

    def __init__(self, action: Literal["stop", "warn"] = "stop") -> None:
        if action not in ACTIONS:
            raise OptionsError(
                f"action={action!r} (on_nonfinite of `lit-ort train`): choose from {', '.join(ACTIONS)}."
            )
        self._action = action
        self._has_warned = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else 0.0
        if math.isfinite(value) or self._has_warned:
            return
        step = f"step {trainer.global_step}, batch {batch_idx} of epoch {trainer.current_epoch}"
        message = f"the training loss is {value} at {step}. {_copy_last(trainer)}"
        if self._action == "stop":
            raise NonFiniteError(
                f"{message} Lower the learning rate, clip gradients, or check this batch. NonFiniteLoss('warn') warns."
            )
        self._has_warned = True
        warnings.warn(f"{message} Training continues.", LitOrtWarning, stacklevel=2)


def _copy_last(trainer: Trainer) -> str:
    """Copies the last checkpoint if its weights are finite. Returns a sentence about it."""
    last = next((part.path for part in trainer.checkpoint_callbacks if isinstance(part, LastCheckpoint)), None)
    if last is None or not last.is_file():
        return "There is no earlier checkpoint."
    if not _is_finite(trainer, last):
        return f"The weights in {last} are not finite either."
    path = last.with_stem(f"{last.stem}_finite")
    # By the process whose loss it is, whatever the loss of the others.
    with last.open("rb") as source, whole_file(path) as copy:
        shutil.copyfileobj(source, copy)
    return f"The last checkpoint with finite weights is kept as {path}."


def _is_finite(trainer: Trainer, path: Path) -> bool:
    state = values_in(trainer, path)["state_dict"]
    # There can be values of `get_extra_state`.
    weights = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return all(bool(torch.isfinite(weight).all()) for weight in weights if weight.is_floating_point())
