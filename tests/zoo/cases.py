"""What a case of the zoo is: a tiny random model, a batch, and a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Args:
        make: from a dropout probability to the module and the batch that it is called with.
        loss: from the module's output to a scalar.
        tolerance: largest relative error of a gradient.
        breaks: whether its own code looks at values, at which a graph ends.
    """

    make: Callable[[float], Made]
    loss: Callable[[Any], Tensor]
    tolerance: float = 1e-4
    breaks: bool = False


def own_loss(output: Any) -> Tensor:
    """Of transformers' models that are given labels."""
    return output.loss


def weighted_mean(output: Tensor) -> Tensor:
    """A scalar to which every element adds in another way, so that errors can't cancel."""
    weights = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
    return (output * weights).mean() + output.square().mean()
