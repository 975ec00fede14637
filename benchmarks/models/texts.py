"""The dimensions of language models for each size."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.case import SMALL


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The dimensions of a transformer for text and of its batch."""

    width: int
    layers: int
    heads: int
    words: int
    batch: int
    length: int

    @property
    def common(self) -> dict[str, Any]:
        """The dimensions by their names in most of transformers' configurations."""
        return dict(
            vocab_size=self.words,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=4 * self.length,
        )

    def ids(self, length: int | None = None) -> Tensor:
        """Random token ids from 3 on, int64[batch, length]."""
        return torch.randint(3, self.words, (self.batch, self.length if length is None else length))


def sizes_of(size: str) -> Sizes:
    """The dimensions of a small model (width 256) or a medium one (width 512)."""
    return Sizes(256, 4, 4, 8_000, 4, 128) if size == SMALL else Sizes(512, 6, 8, 16_000, 4, 256)
