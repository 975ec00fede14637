"""The definition of a model of the suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

SMALL, MEDIUM = "small", "medium"
SIZES = (SMALL, MEDIUM)
ModuleAndBatch = tuple[nn.Module, dict[str, Any]]


def loss_of_output(output: Any) -> Tensor:
    """The loss of transformers' models, which compute it from labels."""
    return output.loss


def identity(output: Any) -> Tensor:
    """The loss of modules that return it."""
    return output


@dataclasses.dataclass(frozen=True)
class Model:
    """One architecture.

    Args:
        make: returns, for a size, the module with random weights and the batch with which it is called.
        loss: returns a scalar loss from the module's output.
        clip: the maximum norm of the gradients; None for models that are usually trained without clipping.
    """

    make: Callable[[str], ModuleAndBatch]
    loss: Callable[[Any], Tensor] = loss_of_output
    clip: float | None = 1.0
