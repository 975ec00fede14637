"""The definition of a case of the zoo: a tiny model with random weights, a batch, and a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ModuleAndBatch = tuple[nn.Module, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Args:
        make: returns, for a dropout probability, the module and the batch with which it is called.
        loss: returns a scalar loss from the module's output.
        tolerance: the largest allowed relative error of a gradient.
        breaks: whether its code reads values of tensors, which breaks the graph. In a loop, Dynamo leaves the function
            in eager, except for functions that it calls.
    """

    make: Callable[[float], ModuleAndBatch]
    loss: Callable[[Any], Tensor]
    tolerance: float = 1e-4
    breaks: bool = False


def loss_of_output(output: Any) -> Tensor:
    """The loss of transformers' models, which compute it from labels."""
    return output.loss


def weighted_mean(output: Tensor) -> Tensor:
    """A scalar in which every element has a different weight, so that errors can't cancel."""
    weights = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
    return (output * weights).mean() + output.square().mean()
