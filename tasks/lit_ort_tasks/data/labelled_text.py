"""Batches of a classifier: token ids of one length, and labels."""

from __future__ import annotations

import os
from abc import abstractmethod
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from rich.progress import track
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

from lit_ort_tasks.data.batches import Batch
from lit_ort_tasks.data.labelled_corpora import (
    LabelledCorpus,
    LabelledSplit,
    docstring_classes,
    glue,
    require_glue_task,
)
from lit_ort_tasks.data.loaders import Shuffled, evaluation_loader, require_batches, training_loader
from lit_ort_tasks.data.tables import TableColumns, table
from lit_ort_tasks.data.tokenization import (
    ENCODED_AT_A_TIME,
    load_tokenizer,
    require_same_tokenizer,
    tokenizer_key,
    train_wordpiece,
)
from lit_ort_tasks.errors import InputError, require, require_whole

# The tokenizer's outputs, with small types: GLUE's largest tasks have 400,000 texts.
INPUTS = {"input_ids": np.int32, "token_type_ids": np.uint8, "attention_mask": np.uint8}


class EncodedTexts(Dataset[Batch]):
    """The texts of a split as ids of one length.

    An item has input_ids, token_type_ids (0 for the first text, 1 for the second) and attention_mask (1 for a token, 0
    for padding), int64[length] each, and labels, int64[].
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, split: LabelledSplit, max_length: int) -> None:
        count = len(split.texts)
        self._inputs = {name: np.zeros((count, max_length), kind) for name, kind in INPUTS.items()}
        self._labels = torch.tensor(split.labels, dtype=torch.int64)
        starts = range(0, count, ENCODED_AT_A_TIME)
        for start in track(starts, description=f"tokenizing {split.source}", transient=True, disable=len(starts) < 2):
            rows = slice(start, start + ENCODED_AT_A_TIME)
            encoded = tokenizer(
                list(split.texts[rows]),
                None if split.pairs is None else list(split.pairs[rows]),
                truncation="longest_first",
                padding="max_length",
                max_length=max_length,
                return_attention_mask=True,
            )
            # The tokenizer of a model without segments returns no token_type_ids: they stay zeros.
            for name in INPUTS.keys() & encoded.keys():
                self._inputs[name][rows] = encoded[name]

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Batch:
        inputs = {name: torch.from_numpy(values[index].astype(np.int64)) for name, values in self._inputs.items()}
        return {**inputs, "labels": self._labels[index]}


class LabelledText(LightningDataModule):
    """Batches of a labelled corpus, which a subclass reads, for a classifier.

    A batch has input_ids, token_type_ids, attention_mask, int64[batch, max_length] each, and labels, int64[batch].

    Args:
        tokenizer: a folder, a checkpoint or a name on the hub, as for `load_tokenizer`; None trains a WordPiece of
            `vocabulary_size` on the training texts.
        max_length: tokens of every item, with the special ones. Longer texts are truncated, in a pair the longer one
            first; shorter ones are padded, so that a compiler has one shape.
        batch_size: texts of a training batch. Texts that don't fill a batch are left out, others in each epoch.
        eval_batch_size: texts of a batch in validation and test. The last batch can be shorter.
        seed: alone determines the order of the training texts in each epoch.

    Raises:
        InputError: a number is too small, the training split has fewer texts than a batch or another split has none, or
            the tokenizer has no padding token or a length below `max_length`.
    """

    def __init__(
        self,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        vocabulary_size: int = 8000,
        max_length: int = 128,
        batch_size: int = 16,
        eval_batch_size: int = 32,
        seed: int = 1,
    ) -> None:
        super().__init__()
        require_whole("data", vocabulary_size=vocabulary_size, batch_size=batch_size, eval_batch_size=eval_batch_size)
        require_whole("data", 8, max_length=max_length)
        require_whole("data", 0, seed=seed)
        self.tokenizer_name = tokenizer
        self.vocabulary_size = vocabulary_size
        self.max_length = max_length
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.seed = seed

    @abstractmethod
    def read(self) -> LabelledCorpus:
        """Read the corpus; called once."""

    @cached_property
    def corpus(self) -> LabelledCorpus:
        """Read at the first use."""
        corpus = self.read()
        for split, name, needed in (
            (corpus.train, "batch_size", self.batch_size),
            (corpus.valid, "eval_batch_size", 1),
            (corpus.test, "eval_batch_size", 1),
        ):
            require(
                len(split.texts) >= needed,
                f"{split.source}: {len(split.texts)} rows, and it needs at least {needed} "
                f"(data.{name}={getattr(self, name)}). Give more rows, or a smaller batch.",
            )
        return corpus

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Loaded or trained at the first use."""
        if self.tokenizer_name is None:
            train = self.corpus.train
            tokenizer = train_wordpiece(chain(train.texts, train.pairs or ()), self.vocabulary_size)
        else:
            tokenizer = load_tokenizer(self.tokenizer_name)
        require(
            tokenizer.pad_token is not None,
            f"model.tokenizer={self.tokenizer_name}: has no padding token, which fills texts up to data.max_length. "
            "Give a tokenizer of a BERT.",
        )
        require(
            self.max_length <= tokenizer.model_max_length,
            f"data.max_length={self.max_length}: the tokenizer {self.tokenizer_name} is for at most "
            f"{tokenizer.model_max_length} tokens. Give a smaller data.max_length.",
        )
        return tokenizer

    @cached_property
    def encoded(self) -> dict[str, EncodedTexts]:
        """The splits train, valid and test, tokenized at the first use."""
        splits = {"train": self.corpus.train, "valid": self.corpus.valid, "test": self.corpus.test}
        return {name: EncodedTexts(self.tokenizer, split, self.max_length) for name, split in splits.items()}

    @property
    def task_arguments(self) -> dict[str, Any]:
        """The arguments of the task that follow from the data."""
        return {"tokenizer": self.tokenizer, "labels": list(self.corpus.labels), "max_length": self.max_length}

    def setup(self, stage: str) -> None:
        require_batches(len(self.encoded["train"]), self.batch_size, self.trainer, "rows")

    def train_dataloader(self) -> DataLoader[Batch]:
        # A shorter last batch would have another shape, and another compiled graph.
        return training_loader(Shuffled(self.encoded["train"], self.seed), self.batch_size, self.trainer)

    def val_dataloader(self) -> DataLoader[Batch]:
        return evaluation_loader(Shuffled(self.encoded["valid"], None), self.eval_batch_size, self.trainer)

    def test_dataloader(self) -> DataLoader[Batch]:
        return evaluation_loader(Shuffled(self.encoded["test"], None), self.eval_batch_size, self.trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"labels": list(self.corpus.labels), "tokenizer": tokenizer_key(self.tokenizer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses a checkpoint with other classes or another tokenizer."""
        labels = list(self.corpus.labels)
        if state_dict["labels"] != labels:
            raise InputError(
                f"The checkpoint was trained on the labels {', '.join(state_dict['labels'])}, and the data has "
                f"{', '.join(labels)}. Resume with the data of the checkpoint."
            )
        require_same_tokenizer(state_dict["tokenizer"], tokenizer_key(self.tokenizer))


class Docstrings(LabelledText):
    """Batches of `labelled_corpora.docstring_classes`: docstrings, with their part of the standard library as label."""

    def __init__(self, *, dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.dir = dir

    def read(self) -> LabelledCorpus:
        return docstring_classes(self.dir)


class Table(LabelledText):
    """Batches of `lit_ort_tasks.data.tables.table`: texts and labels of .csv, .tsv or .jsonl files.

    Args:
        text_column, label_column: the columns (or keys) to read.
        pair_column: the column of the second text, where pairs of texts are classified.
    """

    def __init__(
        self,
        *,
        train_file: str | os.PathLike[str] | None,
        valid_file: str | os.PathLike[str] | None = None,
        test_file: str | os.PathLike[str] | None = None,
        text_column: str = "text",
        pair_column: str | None = None,
        label_column: str = "label",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.files = (train_file, valid_file, test_file)
        self.columns = TableColumns(text_column, pair_column, label_column)

    def read(self) -> LabelledCorpus:
        return table(*self.files, columns=self.columns)


class Glue(LabelledText):
    """Batches of `lit_ort_tasks.data.labelled_corpora.glue`.

    Raises:
        InputError: GLUE has no classification task of that name.
    """

    def __init__(self, *, name: str = "mnli", **options: Any) -> None:
        super().__init__(**options)
        require_glue_task(name)
        self.task_name = name

    def read(self) -> LabelledCorpus:
        return glue(self.task_name)
