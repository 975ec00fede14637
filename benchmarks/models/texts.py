"""Figures of language models in each size: width, layers, words and batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.case import SMALL


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of a transformer over texts."""

    width: int
    layers: int
    heads: int
    words: int
    batch: int
    length: int

    @property
    def common(self) -> dict[str, Any]:
        """As most of transformers' configurations name them."""
        return dict(
            vocab_size=self.words,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=4 * self.length,
        )

    def ids(self, length: int | None = None) -> Tensor:
        """Random words, from 3 on, int64[batch, length]."""
        return torch.randint(3, self.words, (self.batch, self.length if length is None else length))


def figures(size: str) -> Figures:
    """Of a small model (width 256) or a medium one (width 512)."""
    return Figures(256, 4, 4, 8_000, 4, 128) if size == SMALL else Figures(512, 6, 8, 16_000, 4, 256)
