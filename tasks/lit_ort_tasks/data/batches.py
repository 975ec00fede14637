"""What the batches of subword tokens have in common."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

# The target where nothing is predicted: the losses of torch and of the Hugging Face models leave it out.
IGNORED = -100

Batch: TypeAlias = dict[str, Tensor]
