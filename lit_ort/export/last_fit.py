"""What a module was last called with: a batch for `export` where none is passed."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn

from lit_ort.errors import ExportError
from lit_ort.export.call import FORWARD, TRAINING_STEP, evaluating
from lit_ort.export.trainer import trainer_of, without_trainer


def batch_of_last_fit(module: nn.Module, step: str) -> Any:
    """A batch of the training data of the trainer that the module is attached to.

    Args:
        step: of `forward` the arguments that `training_step` calls it with, of `predict_step` the batch itself.

    Returns:
        The batch, as `lit_ort.export` takes it, or None where no trainer with training data is attached.

    Raises:
        ExportError: `training_step` refuses the batch, or doesn't call the module itself.
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
            getattr(module, TRAINING_STEP)(batch, 0)
    # Whatever it raises is what the module says of the batch.
    except Exception as error:
        raise ExportError(
            f"{type(module).__name__}.{TRAINING_STEP} refuses a batch of the last fit outside of it: "
            f"{type(error).__name__}: {error}. Pass the batch that forward is called with."
        ) from error
    finally:
        handle.remove()
    if not calls:
        raise ExportError(
            f"{type(module).__name__}.{TRAINING_STEP} doesn't call the module itself, so that nothing tells what "
            "forward takes. Pass the batch that forward is called with."
        )
    bound = calls[0]
    return bound.args if not bound.kwargs else dict(bound.arguments)
