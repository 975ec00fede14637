"""How much the rows of a batch weigh in its mean loss, for losses of parts of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_ort.errors import OptionsError

Weight = Callable[[Tensor], Tensor | int]

_CROSS_ENTROPIES: tuple[Any, ...] = (F.cross_entropy, F.nll_loss)
_IGNORED = -100


def weight_of(loss: Callable[..., Tensor]) -> Weight:
    """A function from targets to their weight in a mean loss.

    For torch's cross entropies that is the sum of the weights of their classes, without ignored ones; for other losses
    the number of rows.

    Raises:
        OptionsError: the loss isn't a mean.
    """
    settings = _settings_of(loss)
    if settings is None:
        return len
    reduction = settings.get("reduction", "mean")
    if reduction != "mean":
        raise OptionsError(
            f"the loss of a Pipeline has reduction={reduction!r}, but losses of micro-batches are combined to a mean. "
            "Use 'mean'."
        )
    return partial(_weight_of_classes, settings.get("weight"), settings.get("ignore_index", _IGNORED))


def _settings_of(loss: Any) -> Mapping[str, Any] | None:
    """The settings of a cross entropy; None for other losses."""
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return {"weight": loss.weight, "ignore_index": loss.ignore_index, "reduction": loss.reduction}
    if isinstance(loss, partial) and loss.func in _CROSS_ENTROPIES:
        return loss.keywords
    return {} if loss in _CROSS_ENTROPIES else None


def _weight_of_classes(weight: Tensor | None, ignored: int, targets: Tensor) -> Tensor | int:
    if targets.is_floating_point():  # probabilities of classes
        return len(targets)
    counted = targets != ignored
    if weight is None:
        return counted.sum()
    return torch.where(counted, weight[targets.clamp(0, len(weight) - 1)], 0.0).sum()
