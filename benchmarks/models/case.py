"""What a model of the suite is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

SMALL, MEDIUM = "small", "medium"
SIZES = (SMALL, MEDIUM)
Made = tuple[nn.Module, dict[str, Any]]


def own_loss(output: Any) -> Tensor:
    """Of transformers' models that are given labels."""
    return output.loss


def itself(output: Any) -> Tensor:
    """Of modules that return their loss."""
    return output


@dataclasses.dataclass(frozen=True)
class Model:
    """One architecture.

    Args:
        make: from a size to the module, with random weights, and the batch that it is called with.
        loss: from the module's output to a scalar.
        clip: the largest norm of its gradients; None where models of its kind are usually not clipped.
    """

    make: Callable[[str], Made]
    loss: Callable[[Any], Tensor] = own_loss
    clip: float | None = 1.0
