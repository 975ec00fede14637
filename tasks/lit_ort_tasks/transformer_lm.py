"""A transformer language model: the model of PyTorch's word-language-model tutorial.

https://github.com/pytorch/tutorials/blob/main/beginner_source/transformer_tutorial.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_ort_tasks.base import Figures, LanguageModel
from lit_ort_tasks.data.text import TextData
from lit_ort_tasks.errors import require, require_heads, require_whole
from lit_ort_tasks.inference import BatchFirst, Inference, changing, example, word_tokenizer
from lit_ort_tasks.optimization import ScheduleFactory
from lit_ort_tasks.prediction.facts import LANGUAGE_MODEL, Facts

Batch: TypeAlias = tuple[Tensor, Tensor]
ADAM = partial(torch.optim.Adam, lr=1e-3)


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of the position (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762, 3.5)."""

    def __init__(self, width: int, dropout: float, max_length: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(max_length).unsqueeze(1)
        frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        encoding = torch.zeros(max_length, 1, width)
        encoding[:, 0, 0::2] = torch.sin(position * frequency)
        encoding[:, 0, 1::2] = torch.cos(position * frequency[: width // 2])
        self.encoding: Tensor
        self.register_buffer("encoding", encoding, persistent=False)

    def forward(self, embedded: Tensor) -> Tensor:
        """embedded, result: float32[seq, batch, width]."""
        return self.dropout(embedded + self.encoding[: embedded.shape[0]])


class TransformerModel(nn.Module):
    """Embedding, positions, causal encoder layers, linear decoder."""

    def __init__(
        self,
        vocabulary_size: int,
        layers: int,
        heads: int,
        width: int,
        feed_forward: int,
        dropout: float,
        max_length: int,
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.positions = PositionalEncoding(width, dropout, max_length)
        layer = nn.TransformerEncoderLayer(width, heads, feed_forward, dropout)
        # Nested tensors need the batch first, and the default would warn that they are not used.
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, vocabulary_size)
        self.causal_mask: Tensor
        mask = nn.Transformer.generate_square_subsequent_mask(max_length)
        self.register_buffer("causal_mask", mask, persistent=False)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, float32[seq, batch, vocabulary].

        Args:
            tokens: int64[seq, batch], with seq up to max_length.
        """
        length = tokens.shape[0]
        hidden = self.positions(self.embedding(tokens) * math.sqrt(self.width))
        # Without is_causal, torch compares the values of the mask, which is a graph break.
        hidden = self.encoder(hidden, mask=self.causal_mask[:length, :length], is_causal=True)
        return self.decoder(hidden)


class TransformerLM(LanguageModel):
    """Trains `TransformerModel` to predict the next token.

    Args:
        vocabulary_size: from the data.
        optimizer: creates the optimizer from the parameters.
        scheduler: creates the learning-rate schedule; None keeps the learning rate.
        layers, heads, width, feed_forward, dropout: the sizes of the encoder; `heads` divides `width`.
        max_length: the longest sequence, at least the data's bptt.

    Raises:
        InputError: a size is invalid.
    """

    def __init__(
        self,
        vocabulary_size: int,
        optimizer: Callable[..., Optimizer] = ADAM,
        scheduler: ScheduleFactory | None = None,
        *,
        layers: int = 2,
        heads: int = 2,
        width: int = 200,
        feed_forward: int = 200,
        dropout: float = 0.2,
        max_length: int = 512,
    ) -> None:
        super().__init__(optimizer, scheduler, decay_all=True)
        sizes = dict(layers=layers, heads=heads, width=width, feed_forward=feed_forward, max_length=max_length)
        require_whole("task", **sizes)
        require_heads("task", width, heads)
        require(
            isinstance(dropout, (int, float)) and 0 <= dropout < 1,
            f"task.dropout={dropout!r}: must be at least 0 and below 1. Give a probability, 0 for no dropout.",
        )
        self.save_hyperparameters(dict(vocabulary_size=vocabulary_size, dropout=dropout, **sizes), logger=False)
        self.cross_entropy = nn.CrossEntropyLoss()
        self.model = TransformerModel(vocabulary_size, layers, heads, width, feed_forward, dropout, max_length)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, float32[seq, batch, vocabulary], of tokens, int64[seq, batch]."""
        return self.model(tokens)

    def figures(self, batch: Batch) -> Figures:
        """Return the mean cross entropy, float32[], as "loss".

        Args:
            batch: inputs and targets, int64[seq, batch] each.
        """
        inputs, targets = batch
        return {"loss": self.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())}

    def tensor_plan(self) -> dict[str, str]:
        """Return the kind of sharding of each layer that `strategy=ort_tensor` shards."""
        return {
            "model.embedding": "embedding",
            "model.encoder.layers.*.self_attn": "attention",
            "model.encoder.layers.*.linear1": "column",
            "model.encoder.layers.*.linear2": "row",
            "model.decoder": "output",
            "cross_entropy": "cross_entropy",
        }

    def inference(self, data: TextData) -> Inference:
        """Return the model that computes logits, float32[batch, length, vocabulary], from input_ids,
        int64[batch, length].
        """
        words, length = data.streams.vocabulary, int(self.hparams["max_length"])
        # Below the full length: a slice of the whole mask would make the length a constant.
        batch = example(len(words), max(2, length // 2), "input_ids")
        facts = Facts(LANGUAGE_MODEL, length, separator=" ")
        return Inference(BatchFirst(self.model), batch, changing(["input_ids"]), word_tokenizer(words), facts)

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": batch[1].numel()}
