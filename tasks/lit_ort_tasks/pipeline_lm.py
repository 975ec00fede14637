"""The transformer language model in stages: the model of PyTorch's pipeline-parallelism tutorial.

https://github.com/pytorch/tutorials/blob/v2.0.1-rc1/intermediate_source/pipeline_tutorial.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_ort import Pipeline
from lit_ort_tasks.base import Figures, LanguageModel
from lit_ort_tasks.data.text import TextData
from lit_ort_tasks.errors import require, require_heads, require_whole
from lit_ort_tasks.inference import Inference, changing, example, word_tokenizer
from lit_ort_tasks.optimization import ScheduleFactory
from lit_ort_tasks.prediction.facts import LANGUAGE_MODEL, Facts
from lit_ort_tasks.transformer_lm import PositionalEncoding

Batch: TypeAlias = tuple[Tensor, Tensor]
SGD = partial(torch.optim.SGD, lr=5.0)


class Stage(nn.Module):
    """Consecutive encoder layers, in the first stage with the embedding, in the last one with the decoder."""

    def __init__(
        self, layers: Sequence[nn.Module], before: nn.Module | None, after: nn.Module | None, max_length: int
    ) -> None:
        super().__init__()
        self.before = before
        self.layers = nn.ModuleList(layers)
        self.after = after
        self.causal_mask: Tensor
        mask = nn.Transformer.generate_square_subsequent_mask(max_length)
        self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32[batch, seq, width], or in the last stage logits, float32[batch, seq, vocabulary].

        Args:
            hidden: float32[batch, seq, width], or in the first stage tokens, int64[batch, seq].
        """
        if self.before is not None:
            hidden = self.before(hidden)
        length = hidden.shape[1]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.causal_mask[:length, :length], is_causal=True)
        return hidden if self.after is None else self.after(hidden)


class Stages(nn.Module):
    """All stages of a pipeline, one after the other."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.stages = pipeline.stages

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits, float32[batch, seq, vocabulary], of input_ids, int64[batch, seq]."""
        hidden = input_ids
        for stage in self.stages.values():
            hidden = stage(hidden)
        return hidden


class Embedding(nn.Module):
    def __init__(self, vocabulary_size: int, width: int, dropout: float, max_length: int) -> None:
        super().__init__()
        self.width = width
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = PositionalEncoding(width, dropout, max_length)
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens) * math.sqrt(self.width)
        return self.positions(embedded.transpose(0, 1)).transpose(0, 1)


def decoder(width: int, vocabulary_size: int) -> nn.Linear:
    linear = nn.Linear(width, vocabulary_size)
    nn.init.uniform_(linear.weight, -0.1, 0.1)
    nn.init.zeros_(linear.bias)
    return linear


class PipelineLM(LanguageModel):
    """Trains an encoder in stages to predict the next token. With `strategy=ort_pipeline` a process has some of them.

    Args:
        vocabulary_size: from the data.
        optimizer: creates the optimizer from the parameters.
        scheduler: creates the learning-rate schedule; None keeps the learning rate.
        stages: the number of stages, which have equally many layers.
        layers, heads, width, feed_forward, dropout: the sizes of the encoder; `heads` divides `width`.
        max_length: the longest sequence, at least the data's bptt.

    Raises:
        InputError: a size is invalid, or the stages don't divide the layers.
    """

    def __init__(
        self,
        vocabulary_size: int,
        optimizer: Callable[..., Optimizer] = SGD,
        scheduler: ScheduleFactory | None = None,
        *,
        stages: int = 2,
        layers: int = 4,
        heads: int = 4,
        width: int = 256,
        feed_forward: int = 256,
        dropout: float = 0.2,
        max_length: int = 512,
    ) -> None:
        super().__init__(optimizer, scheduler, decay_all=True)
        sizes = dict(
            stages=stages, layers=layers, heads=heads, width=width, feed_forward=feed_forward, max_length=max_length
        )
        require_whole("task", **sizes)
        require_heads("task", width, heads)
        require(
            layers % stages == 0,
            f"task.layers={layers}: not divisible by task.stages={stages}. Stages have equally many layers: try "
            f"task.layers={-(-layers // stages) * stages}.",
        )
        require(stages > 1, "task.stages=1: a pipeline has two or more. For one process use task=transformer_lm.")
        self.save_hyperparameters(dict(vocabulary_size=vocabulary_size, dropout=dropout, **sizes), logger=False)
        self.pipeline: Pipeline | None = None

    def configure_model(self) -> None:
        if self.pipeline is None:
            stages = [partial(self._stage, number) for number in range(self.hparams["stages"])]
            self.pipeline = Pipeline(stages, _mean_cross_entropy)

    def _stage(self, number: int) -> Stage:
        sizes = self.hparams
        width, dropout, words = sizes["width"], sizes["dropout"], sizes["vocabulary_size"]
        encoder = partial(nn.TransformerEncoderLayer, width, sizes["heads"], sizes["feed_forward"], dropout)
        layers = [encoder(batch_first=True) for _ in range(sizes["layers"] // sizes["stages"])]
        first, last = number == 0, number == sizes["stages"] - 1
        embedding = Embedding(words, width, dropout, sizes["max_length"]) if first else None
        return Stage(layers, embedding, decoder(width, words) if last else None, sizes["max_length"])

    def inference(self, data: TextData) -> Inference:
        """Return the model that computes logits, float32[batch, length, vocabulary], from input_ids,
        int64[batch, length].
        """
        assert self.pipeline is not None, "a model is exported after fit"
        words, length = data.streams.vocabulary, self.hparams["max_length"]
        batch = example(len(words), max(2, length // 2), "input_ids")
        facts = Facts(LANGUAGE_MODEL, length, separator=" ")
        return Inference(Stages(self.pipeline), batch, changing(["input_ids"]), word_tokenizer(words), facts)

    def figures(self, batch: Batch) -> Figures:
        """Return the mean cross entropy, float32[], as "loss".

        Args:
            batch: inputs and targets, int64[seq, batch] each.
        """
        assert self.pipeline is not None, "the Trainer calls configure_model() before any step"
        inputs, targets = batch
        return {"loss": self.pipeline(inputs.T.contiguous(), targets.T.contiguous())}

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": batch[1].numel()}


def _mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
