"""Batches of a word-level language model: tokens, a vocabulary, a stream of ids.

This file contains all uses of torchtext. 0.6.0 is its last release without a C++ extension for one torch version.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchtext.data.utils import get_tokenizer
from torchtext.vocab import Vocab

from lit_ort_tasks.data.corpora import Corpus, python_docs, wikitext2
from lit_ort_tasks.data.loaders import Ready, evaluation_loader, require_batches, training_loader
from lit_ort_tasks.errors import InputError, require, require_whole

UNKNOWN = "<unk>"

Batch = tuple[Tensor, Tensor]


def tokenize(text: str) -> list[str]:
    """Return the tokens of torchtext's `basic_english`: lower case, with separate punctuation. Line ends are spaces."""
    tokenizer: Callable[[str], list[str]] = get_tokenizer("basic_english")  # pyright: ignore[reportAssignmentType]
    return tokenizer(text)


def build_vocabulary(tokens: Sequence[str], min_frequency: int = 1) -> list[str]:
    """Return the words by id: `<unk>`, then by decreasing frequency, with equal frequencies in alphabetical order."""
    return Vocab(Counter(tokens), min_freq=min_frequency, specials=[UNKNOWN]).itos


def encode(tokens: Sequence[str], vocabulary: Sequence[str]) -> Tensor:
    """Return the ids of the tokens, int64[tokens]; words outside the vocabulary have the id of `<unk>`."""
    ids = {word: index for index, word in enumerate(vocabulary)}
    unknown = ids[UNKNOWN]
    return torch.tensor([ids.get(token, unknown) for token in tokens], dtype=torch.int64)


def batchify(stream: Tensor, batch_size: int) -> Tensor:
    """Split one continuous stream into columns, int64[rows, batch], without the tail that doesn't fill a row."""
    rows = len(stream) // batch_size
    return stream[: rows * batch_size].view(batch_size, rows).t().contiguous()


class StreamBatches(Dataset[Batch]):
    """Consecutive rows of the columns: item i is inputs and targets, int64[seq, batch] each, targets one row later.

    `seq` is `bptt`, in the last item possibly shorter.
    """

    def __init__(self, columns: Tensor, bptt: int) -> None:
        self.columns = columns
        self.bptt = bptt

    def __len__(self) -> int:
        return -(-(len(self.columns) - 1) // self.bptt)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        start = index * self.bptt
        stop = min(start + self.bptt, len(self.columns) - 1)
        return self.columns[start:stop], self.columns[start + 1 : stop + 1]


def count_tokens(batch: Batch) -> int:
    """Return the number of target tokens of a batch."""
    return batch[1].numel()


@dataclass(frozen=True)
class Streams:
    """A corpus as ids, int64[tokens] each, and the words by id."""

    vocabulary: list[str]
    train: Tensor
    valid: Tensor
    test: Tensor


class TextData(LightningDataModule):
    """Batches of a corpus, which a subclass reads, for a language model.

    Args:
        batch_size: columns of a training batch.
        eval_batch_size: columns of a batch in validation and test.
        bptt: rows of a batch, the steps of backpropagation through time.
        min_frequency: less frequent words of the training split have the id of `<unk>`.

    Raises:
        InputError: a number is below 1, or a split has fewer tokens than one batch with its targets.
    """

    # The batch dimension of the tensors, which is the first one in other data.
    batch_dim = 1

    def __init__(
        self, *, batch_size: int = 20, eval_batch_size: int = 10, bptt: int = 35, min_frequency: int = 1
    ) -> None:
        super().__init__()
        require_whole(
            "data", batch_size=batch_size, eval_batch_size=eval_batch_size, bptt=bptt, min_frequency=min_frequency
        )
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.bptt = bptt
        self.min_frequency = min_frequency

    @abstractmethod
    def read(self) -> Corpus:
        """Read the corpus; called once."""

    @cached_property
    def streams(self) -> Streams:
        """Read, tokenized and encoded at the first use."""
        corpus = self.read()
        train, valid, test = (tokenize(split.text) for split in (corpus.train, corpus.valid, corpus.test))
        self._check_length(corpus.train.source, len(train), "batch_size", self.batch_size)
        self._check_length(corpus.valid.source, len(valid), "eval_batch_size", self.eval_batch_size)
        self._check_length(corpus.test.source, len(test), "eval_batch_size", self.eval_batch_size)
        vocabulary = build_vocabulary(train, self.min_frequency)
        return Streams(vocabulary, encode(train, vocabulary), encode(valid, vocabulary), encode(test, vocabulary))

    def _check_length(self, source: str, tokens: int, name: str, batch_size: int) -> None:
        needed = batch_size * (self.bptt + 1)
        require(
            tokens >= needed,
            f"{source}: {tokens} tokens, and one batch with its targets needs {needed} "
            f"(data.{name}={batch_size} x (data.bptt={self.bptt} + 1)). Give more text, or smaller numbers.",
        )

    @property
    def task_arguments(self) -> dict[str, Any]:
        """The arguments of the task that follow from the data."""
        return {"vocabulary_size": len(self.streams.vocabulary), "max_length": self.bptt}

    def setup(self, stage: str) -> None:
        # Each row but its last token, in parts of at most `bptt` tokens.
        parts = -(-(len(self.streams.train) // self.batch_size - 1) // self.bptt)
        require_batches(parts * self.batch_size, self.batch_size, self.trainer, "parts of its text")

    def train_dataloader(self) -> DataLoader[Batch]:
        return training_loader(self._batches(self.streams.train, self.batch_size), 1, self.trainer)

    def val_dataloader(self) -> DataLoader[Batch]:
        return evaluation_loader(self._batches(self.streams.valid, self.eval_batch_size), 1, self.trainer)

    def test_dataloader(self) -> DataLoader[Batch]:
        return evaluation_loader(self._batches(self.streams.test, self.eval_batch_size), 1, self.trainer)

    def _batches(self, stream: Tensor, batch_size: int) -> Ready:
        return Ready(StreamBatches(batchify(stream, batch_size), self.bptt))

    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": self.streams.vocabulary}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses a checkpoint with another vocabulary."""
        saved, own = state_dict["vocabulary"], self.streams.vocabulary
        if saved != own:
            raise InputError(
                f"The checkpoint was trained on a vocabulary of {len(saved)} words, and the data has another one, of "
                f"{len(own)}. Resume with the data (and for data=python_docs the Python version) of the checkpoint."
            )


class PythonDocs(TextData):
    """Batches of `lit_ort_tasks.data.corpora.python_docs`."""

    def __init__(self, *, dir: str | os.PathLike[str] | None = None, **options: int) -> None:
        super().__init__(**options)
        self.dir = dir

    def read(self) -> Corpus:
        return python_docs(self.dir)


class WikiText2(TextData):
    """Batches of `lit_ort_tasks.data.corpora.wikitext2`."""

    def __init__(self, *, dir: str | os.PathLike[str] | None = None, **options: int) -> None:
        super().__init__(**options)
        self.dir = dir

    def read(self) -> Corpus:
        return wikitext2(self.dir)
