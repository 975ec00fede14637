"""A transformer language model: PyTorch's word-language-model tutorial, the whole of it in this file.

https://github.com/pytorch/tutorials/blob/main/beginner_source/transformer_tutorial.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric

from tasks.errors import require

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
        # Nested tensors want the batch first; asking for them would only draw a warning.
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, vocabulary_size)
        self.causal_mask: Tensor
        mask = nn.Transformer.generate_square_subsequent_mask(max_length)
        self.register_buffer("causal_mask", mask, persistent=False)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64[seq, batch], seq up to max_length. Returns logits, float32[seq, batch, vocabulary]."""
        length = tokens.shape[0]
        hidden = self.positions(self.embedding(tokens) * math.sqrt(self.width))
        # is_causal is said, because finding it out from the mask looks at values, which breaks a captured graph.
        hidden = self.encoder(hidden, mask=self.causal_mask[:length, :length], is_causal=True)
        return self.decoder(hidden)


class TransformerLM(LightningModule):
    """Trains `TransformerModel` to predict the next token.

    vocabulary_size: comes from the data.
    optimizer: makes the optimizer from the parameters.
    scheduler: makes the learning-rate schedule from the optimizer; it advances once an epoch. None keeps the rate.
    layers, heads, width, feed_forward, dropout: the shape of the encoder; `width` is divisible by `heads`.
    max_length: the longest sequence that the model takes, at least the data's bptt.

    Logs train/loss and train/ppl (means over the tokens since the last logged step), and val/loss, val/ppl, test/loss,
    test/ppl (means over the tokens of the whole split). ppl, the perplexity, is exp(loss).

    Raises InputError for a figure that no model can have.
    """

    def __init__(
        self,
        vocabulary_size: int,
        optimizer: Callable[..., Optimizer] = ADAM,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        *,
        layers: int = 2,
        heads: int = 2,
        width: int = 200,
        feed_forward: int = 200,
        dropout: float = 0.2,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        figures = dict(layers=layers, heads=heads, width=width, feed_forward=feed_forward, max_length=max_length)
        for name, value in figures.items():
            require(
                isinstance(value, int) and value >= 1,
                f"task.{name}={value!r}: must be a whole number of at least 1. Give one, or leave it out.",
            )
        require(
            width % heads == 0,
            f"task.width={width}: not divisible by task.heads={heads}. Each head takes an equal part of the width: "
            f"try task.width={-(-width // heads) * heads}.",
        )
        require(
            isinstance(dropout, (int, float)) and 0 <= dropout < 1,
            f"task.dropout={dropout!r}: must be at least 0 and below 1. Give such a share, 0 for none.",
        )
        self.save_hyperparameters(dict(vocabulary_size=vocabulary_size, dropout=dropout, **figures), logger=False)
        self.model = TransformerModel(vocabulary_size, layers, heads, width, feed_forward, dropout, max_length)
        self.optimizer_factory = optimizer
        self.scheduler_factory = scheduler
        self.evaluated_loss = MeanMetric()
        self.window_loss = torch.zeros(())
        self.window_tokens = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64[seq, batch]. Returns logits, float32[seq, batch, vocabulary]."""
        return self.model(tokens)

    def loss(self, batch: Batch) -> Tensor:
        """batch: inputs and targets, int64[seq, batch] each. Returns the mean cross entropy, float32[]."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    # The steps are tensor code alone, so that a compiler captures each as one graph; the hooks below log.

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        tokens = batch[1].numel()
        self.window_loss = self.window_loss.to(self.device) + outputs["loss"].detach() * tokens
        self.window_tokens += tokens
        mean = self.window_loss / self.window_tokens
        self.log("train/loss", mean, prog_bar=True, batch_size=tokens)
        self.log("train/ppl", mean.exp(), prog_bar=True, batch_size=tokens)
        every = self.trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
        if self.trainer.global_step % every == 0:  # Lightning writes this step's values
            self.window_loss = torch.zeros(())
            self.window_tokens = 0

    def on_validation_batch_end(self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated_loss.update(outputs, weight=batch[1].numel())

    def on_test_batch_end(self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated_loss.update(outputs, weight=batch[1].numel())

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, split: str) -> None:
        loss = self.evaluated_loss.compute()
        self.evaluated_loss.reset()
        self.log(f"{split}/loss", loss)
        self.log(f"{split}/ppl", loss.exp(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_factory(self.parameters())
        if self.scheduler_factory is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler_factory(optimizer)}
