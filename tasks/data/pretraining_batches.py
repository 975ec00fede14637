"""What every source of BERT pre-training batches shares: the batches of an epoch, the loaders, the checkpoint's check.

A batch is a dict of int64 tensors, the names those of `transformers.BertForPreTraining`:

    input_ids[batch, length]       `[CLS] A [SEP] B [SEP]`, some tokens masked, filled up with [PAD]
    token_type_ids[batch, length]  0 up to the first [SEP], 1 up to the second, 0 on padding
    attention_mask[batch, length]  1 on tokens, 0 on padding
    labels[batch, length]          the token to predict, -100 where none is
    next_sentence_label[batch]     0 where B follows A in the text, 1 where B is from another document
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import PreTrainedTokenizerFast

from tasks.data.batches import Batch
from tasks.data.tokenization import tokenizer_key
from tasks.errors import InputError, require, require_whole


@dataclass(frozen=True)
class BatchKey:
    """The items from place `start` up to `stop` in the order of an epoch."""

    epoch: int
    start: int
    stop: int


class BatchSource(Dataset[Batch]):
    """Items that are drawn anew for every epoch, and read a batch at a time by a `BatchKey`."""

    @abstractmethod
    def __len__(self) -> int:
        """Items of an epoch; the same for every epoch."""

    @abstractmethod
    def __getitem__(self, key: BatchKey) -> Batch: ...


@dataclass(frozen=True)
class Share:
    """Which batches a process takes: of `ranks` processes, number `rank` takes every `ranks`-th from its own number on.

    All take as many.
    """

    ranks: int = 1
    rank: int = 0


ALL = Share()


class FixedBatches(DistributedSampler[BatchKey]):
    """The same batches at every epoch; the last one is shorter where the items don't divide. Where the batches don't
    divide by the processes, the first ones are read again.
    """

    def __init__(self, items: int, batch_size: int, share: Share = ALL) -> None:
        # Lightning leaves a sampler of this class as it is.
        of: Any = range(items)
        super().__init__(of, share.ranks, share.rank, shuffle=False)
        self.items = items
        self.batch_size = batch_size
        self.share = share
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Nothing: they are the same."""

    def __len__(self) -> int:
        return -(-self._batches_of_all() // self.share.ranks)

    def __iter__(self) -> Iterator[BatchKey]:
        for batch in range(len(self)):
            start = self._place(batch) % self._batches_of_all() * self.batch_size
            yield BatchKey(self.epoch, start, min(start + self.batch_size, self.items))

    def _batches_of_all(self) -> int:
        return -(-self.items // self.batch_size)

    def _place(self, batch: int) -> int:
        """Among the batches of all processes, of this one's batch."""
        return batch * self.share.ranks + self.share.rank


class EpochBatches(FixedBatches):
    """Full batches of the epoch that was set last. Lightning sets it on the sampler of a loader before each epoch."""

    def __init__(self, items: int, batch_size: int, share: Share = ALL) -> None:
        super().__init__(items, batch_size, share)
        # The epoch as Lightning numbers it, and its batches so far, of all processes together.
        self._epoch, self._batches = 0, 0
        # By how much Lightning's number is too high.
        self._ahead = 0
        self._resuming = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Where the iteration is."""
        return {"epoch": self._epoch, "batches": self._batches, "ahead": self._ahead}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Makes the next iteration go on from there, unless another epoch is set: that begins with its first batch."""
        self._epoch, self._batches, self._ahead = (state_dict[name] for name in ("epoch", "batches", "ahead"))
        self._resuming = True

    def __len__(self) -> int:
        return self.items // self.batch_size // self.share.ranks

    def __iter__(self) -> Iterator[BatchKey]:
        first = 0
        if self._resuming:
            self._resuming = False
            if self.epoch == self._epoch:
                first = self._batches // self.share.ranks
            else:
                # By 0, but Lightning counts one too many where max_steps is set and the state is from an epoch's end.
                self._ahead += self.epoch - (self._epoch + 1)
        epoch = self.epoch - self._ahead
        for batch in range(first, len(self)):
            self._epoch, self._batches = self.epoch, (batch + 1) * self.share.ranks
            start = self._place(batch) * self.batch_size
            yield BatchKey(epoch, start, start + self.batch_size)


class BatchLoader(DataLoader[Batch]):
    """Batches of a source, in the process that asks for them."""

    def __init__(self, source: BatchSource, sampler: FixedBatches) -> None:
        # A key makes a whole batch (batch_size=None), in numpy: worker processes would only add copies. The loader's
        # own generator keeps it from drawing from torch's global one at every epoch.
        super().__init__(source, batch_size=None, sampler=sampler, generator=torch.Generator())


class EpochLoader(BatchLoader):
    """The batches of training. Lightning keeps the state in its checkpoints, so that a run resumes within an epoch."""

    def __init__(self, source: BatchSource, sampler: EpochBatches) -> None:
        super().__init__(source, sampler)
        self.state_dict = sampler.state_dict
        self.load_state_dict = sampler.load_state_dict


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
        items, ranks = len(self.splits.train), self._share.ranks
        require(
            items >= self.batch_size * ranks,
            f"data.batch_size={self.batch_size}: training has only {items} items, and no full batch for each of "
            f"{ranks} processes. Give a smaller one, fewer processes, or more data.",
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        return EpochLoader(self.splits.train, EpochBatches(len(self.splits.train), self.batch_size, self._share))

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._evaluation(self.splits.valid)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._evaluation(self.splits.test)

    def _evaluation(self, source: BatchSource) -> DataLoader[Batch]:
        return BatchLoader(source, FixedBatches(len(source), self.eval_batch_size, self._share))

    @property
    def _share(self) -> Share:
        return ALL if self.trainer is None else Share(self.trainer.world_size, self.trainer.global_rank)

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
