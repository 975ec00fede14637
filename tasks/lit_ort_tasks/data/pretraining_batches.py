"""The common parts of all sources of BERT pre-training batches: the form, the loaders, the check of a checkpoint.

A batch is a dict of int64 tensors, with the names of `transformers.BertForPreTraining`:

    input_ids[batch, length]       `[CLS] A [SEP] B [SEP]`, some tokens masked, padded with [PAD]
    token_type_ids[batch, length]  0 up to the first [SEP], 1 up to the second, 0 on padding
    attention_mask[batch, length]  1 on tokens, 0 on padding
    labels[batch, length]          the token to predict, -100 elsewhere
    next_sentence_label[batch]     0 where B follows A in the text, 1 where B is from another document
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from lit_ort_tasks.data.batches import Batch
from lit_ort_tasks.data.loaders import BatchSource, evaluation_loader, require_batches, training_loader
from lit_ort_tasks.data.tokenization import tokenizer_key
from lit_ort_tasks.errors import InputError, require, require_whole


@dataclass(frozen=True)
class Splits:
    """The sources of the three splits, and the values of the model that follow from them.

    Args:
        tokenizer: None where there are ids without a tokenizer.
    """

    train: BatchSource
    valid: BatchSource
    test: BatchSource
    tokenizer: PreTrainedTokenizerFast | None
    vocabulary_size: int
    max_length: int


class PretrainingData(LightningDataModule):
    """Batches for BERT pre-training, which a subclass reads. This module's docstring has their form.

    Args:
        batch_size: items of a training batch. An incomplete last batch is left out.
        eval_batch_size: items of a batch in validation and test.
        seed: with the number of the epoch, it determines the random parts of the training batches. Validation and test
            are the same in every epoch and for every seed.

    Raises:
        InputError: a size is below 1, the seed is below 0, or training has fewer items than one batch.
    """

    def __init__(self, *, batch_size: int, eval_batch_size: int, seed: int) -> None:
        super().__init__()
        require_whole("data", batch_size=batch_size, eval_batch_size=eval_batch_size)
        require_whole("data", 0, seed=seed)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.seed = seed

    @abstractmethod
    def read(self) -> Splits:
        """Read the data; called once."""

    @cached_property
    def splits(self) -> Splits:
        """Read at the first use."""
        splits = self.read()
        require(
            len(splits.train) >= self.batch_size,
            f"data.batch_size={self.batch_size}: training has only {len(splits.train)} items, and no full batch. "
            "Give a smaller one, or more data.",
        )
        return splits

    @property
    def task_arguments(self) -> dict[str, Any]:
        """The arguments of the task that follow from the data."""
        splits = self.splits
        return {
            "tokenizer": splits.tokenizer,
            "vocabulary_size": splits.vocabulary_size,
            "max_length": splits.max_length,
        }

    def setup(self, stage: str) -> None:
        require_batches(len(self.splits.train), self.batch_size, self.trainer, "items")

    def train_dataloader(self) -> DataLoader[Batch]:
        return training_loader(self.splits.train, self.batch_size, self.trainer)

    def val_dataloader(self) -> DataLoader[Batch]:
        return evaluation_loader(self.splits.valid, self.eval_batch_size, self.trainer)

    def test_dataloader(self) -> DataLoader[Batch]:
        return evaluation_loader(self.splits.test, self.eval_batch_size, self.trainer)

    def state_dict(self) -> dict[str, Any]:
        tokenizer = self.splits.tokenizer
        return {
            "tokenizer": None if tokenizer is None else tokenizer_key(tokenizer),
            "vocabulary_size": self.splits.vocabulary_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses a checkpoint with another tokenizer."""
        own = self.state_dict()
        if state_dict != own:
            raise InputError(
                f"The checkpoint was trained with a tokenizer of {state_dict['vocabulary_size']} tokens, and the data "
                f"has another one, of {own['vocabulary_size']}. Resume with the data.tokenizer of the checkpoint, or "
                "where that is null, with the same text (and Python)."
            )
