"""What every source of BERT pre-training batches shares: their form, the loaders, the checkpoint's check.

A batch is a dict of int64 tensors, the names those of `transformers.BertForPreTraining`:

    input_ids[batch, length]       `[CLS] A [SEP] B [SEP]`, some tokens masked, filled up with [PAD]
    token_type_ids[batch, length]  0 up to the first [SEP], 1 up to the second, 0 on padding
    attention_mask[batch, length]  1 on tokens, 0 on padding
    labels[batch, length]          the token to predict, -100 where none is
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
from lit_ort_tasks.data.loaders import BatchSource, evaluation_loader, share_of, training_loader
from lit_ort_tasks.data.tokenization import tokenizer_key
from lit_ort_tasks.errors import InputError, require, require_whole


@dataclass(frozen=True)
class Splits:
    """What was read: the three sources, and what they decide about the model.

    tokenizer: None where the ids come without one.
    """

    train: BatchSource
    valid: BatchSource
    test: BatchSource
    tokenizer: PreTrainedTokenizerFast | None
    vocabulary_size: int
    max_length: int


class PretrainingData(LightningDataModule):
    """Batches for BERT pre-training (this module's docstring has their form); a subclass says where they come from.

    batch_size, eval_batch_size: items of a batch in training, and in validation and test. Training leaves out a last
        batch that is not full.
    seed: with the number of the epoch it decides all that is random in the training batches. Validation and test are
        the same in every epoch, of every seed.

    Raises InputError for a size below 1 or a seed below 0, and when training has fewer items than one batch.
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
        """The data; called once."""

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
        """What the data decide about the task: passed to it when it is made."""
        splits = self.splits
        return {
            "tokenizer": splits.tokenizer,
            "vocabulary_size": splits.vocabulary_size,
            "max_length": splits.max_length,
        }

    def setup(self, stage: str) -> None:
        items, ranks = len(self.splits.train), share_of(self.trainer).ranks
        require(
            items >= self.batch_size * ranks,
            f"data.batch_size={self.batch_size}: training has only {items} items, and no full batch for each of "
            f"{ranks} processes. Give a smaller one, fewer processes, or more data.",
        )

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
        """Refuses a checkpoint whose ids mean other tokens."""
        read = self.state_dict()
        if state_dict != read:
            raise InputError(
                f"The checkpoint was trained with a tokenizer of {state_dict['vocabulary_size']} tokens, and the data "
                f"give one of {read['vocabulary_size']}, not the same one. Resume with the data.tokenizer, and where "
                "that is null the text (and Python), that it was made with."
            )
