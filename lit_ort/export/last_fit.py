"""The batch of `export` if none is passed: a batch of the module's last fit."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn

from lit_ort._compat.lightning import step_arguments
from lit_ort.errors import ExportError
from lit_ort.export.call import FORWARD, TRAINING_STEP, evaluating
from lit_ort.export.trainer import trainer_of, without_trainer


def batch_of_last_fit(module: nn.Module, step: str) -> Any:
    """A batch of the training data of the trainer that the module is attached to.

    Args:
        module: the module.
        step: for `forward`, the arguments with which `training_step` calls it are returned; for `predict_step`, the
            batch itself.

    Returns:
        The batch in a form that `lit_ort.export` accepts, or None if no trainer with training data is attached.

    Raises:
        ExportError: `training_step` rejects the batch, or doesn't call the module itself.
    """
    loader = getattr(trainer_of(module), "train_dataloader", None)
    if loader is None:
        return None
    batch, _, _ = next(iter(CombinedLoader(loader)))
    return _arguments_of_forward(module, batch) if step == FORWARD else batch


def _arguments_of_forward(module: nn.Module, batch: Any) -> Any:
    calls: list[inspect.BoundArguments] = []
    signature = inspect.signature(module.forward)
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(signature.bind(*args, **kwargs)), with_kwargs=True
    )
    try:
        with evaluating(module), without_trainer(module), torch.no_grad():
            method = getattr(module, TRAINING_STEP)
            method(*step_arguments(method, batch))
    # User code can raise any exception.
    except Exception as error:
        raise ExportError(
            f"{type(module).__name__}.{TRAINING_STEP} rejects a batch of the last fit: "
            f"{type(error).__name__}: {error}. Pass a batch with which forward is called."
        ) from error
    finally:
        handle.remove()
    if not calls:
        raise ExportError(
            f"{type(module).__name__}.{TRAINING_STEP} doesn't call the module itself, so the arguments of forward are "
            "unknown. Pass a batch with which forward is called."
        )
    call = calls[0]
    return call.args if not call.kwargs else dict(call.arguments)
