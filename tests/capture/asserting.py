"""Functions with assertions, which pytest rewrites in test modules."""

from __future__ import annotations

import torch
from torch import Tensor


def asserted(loss: Tensor) -> Tensor:
    if loss > 100:
        loss = loss * 0.5
    assert torch.isfinite(loss), "loss is not finite"
    return loss


def asserted_alone(loss: Tensor) -> None:
    assert (loss.square() + 1).isfinite().all()


def written(loss: Tensor) -> None:
    loss.mul_(2)
    assert torch.isfinite(loss)
