"""The common parts of batches of subword tokens."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

# The target where nothing is predicted. The losses of torch and of transformers ignore it.
IGNORED = -100

Batch: TypeAlias = dict[str, Tensor]
