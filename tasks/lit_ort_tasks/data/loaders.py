"""Loaders that resume within an epoch, at the next batch in the same order, and divide batches among processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler, default_collate

from lit_ort_tasks.errors import require


@dataclass(frozen=True)
class BatchKey:
    """The items from position `start` up to `stop` in the order of an epoch."""

    epoch: int
    start: int
    stop: int


class BatchSource(Dataset[Any]):
    """Items that are read a batch at a time by a `BatchKey`. Each epoch can have other items or another order."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items of an epoch, the same for every epoch."""

    @abstractmethod
    def __getitem__(self, key: BatchKey) -> Any:
        """Return a collated batch."""


class Shuffled(BatchSource):
    """The items of a dataset in an order that follows from seed and epoch alone.

    Args:
        items: by index.
        seed: None keeps the order of the dataset in every epoch.
    """

    def __init__(self, items: Dataset[Any], seed: int | None) -> None:
        self._items, self._seed = items, seed
        self._order: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self._items)  # pyright: ignore[reportArgumentType] - those with a length

    def __getitem__(self, key: BatchKey) -> Any:
        return default_collate([self._items[index] for index in self._indices(key.epoch)[key.start : key.stop]])

    def _indices(self, epoch: int) -> Sequence[int]:
        if self._seed is None:
            return range(len(self))
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(hash((self._seed, epoch)) & (2**63 - 1))
            self._order = epoch, torch.randperm(len(self), generator=generator).tolist()
        return self._order[1]


class Ready(BatchSource):
    """A dataset whose items are batches, read one at a time, in order."""

    def __init__(self, batches: Dataset[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)  # pyright: ignore[reportArgumentType] - those with a length

    def __getitem__(self, key: BatchKey) -> Any:
        return self._batches[key.start]


@dataclass(frozen=True)
class Share:
    """The batches of one process: of `ranks` processes, number `rank` has every `ranks`-th batch from number `rank` on.

    Every process has the same number of batches.
    """

    ranks: int = 1
    rank: int = 0


ALL = Share()


def share_of(trainer: Trainer | None) -> Share:
    """Return the share of a Trainer's process. Processes with parts of one model read the same batches."""
    sampler = None if trainer is None else trainer.distributed_sampler_kwargs
    return ALL if sampler is None else Share(sampler["num_replicas"], sampler["rank"])


def require_batches(items: int, batch_size: int, trainer: Trainer | None, kind: str) -> None:
    """Checks that each process has a full training batch.

    Args:
        items: of the training data, or its batches, with a batch size of 1.
        kind: of the items, for the message.

    Raises:
        InputError: there are too few.
    """
    ranks = share_of(trainer).ranks
    require(
        items >= batch_size * ranks,
        f"data.batch_size={batch_size}: training has only {items} {kind}, and no full batch for each of {ranks} "
        "processes. Give a smaller one, fewer processes, or more data.",
    )


# Lightning replaces other samplers: where there are several processes, those that are no DistributedSampler, and with
# overfit_batches those that are no SequentialSampler.
class FixedBatches(DistributedSampler[BatchKey], SequentialSampler):  # pyright: ignore[reportGeneralTypeIssues]
    """The same batches in every epoch. The last one can be shorter.

    Where the number of processes doesn't divide the batches, the first ones are repeated.
    """

    def __init__(self, items: int, batch_size: int, share: Share = ALL) -> None:
        dataset: Any = range(items)
        super().__init__(dataset, share.ranks, share.rank, shuffle=False)
        self.items = items
        self.batch_size = batch_size
        self.share = share
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: every epoch has the same batches."""

    def __len__(self) -> int:
        return -(-self._batches_of_all() // self.share.ranks)

    def __iter__(self) -> Iterator[BatchKey]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for batch in range(len(self)):
            start = self._index(batch) % self._batches_of_all() * self.batch_size
            yield BatchKey(self.epoch, start, min(start + self.batch_size, self.items))

    def _batches_of_all(self) -> int:
        return -(-self.items // self.batch_size)

    def _index(self, batch: int) -> int:
        """The index of this process's batch among the batches of all processes."""
        return batch * self.share.ranks + self.share.rank


class EpochBatches(FixedBatches):
    """Full batches of the epoch that was set last. Lightning sets it on the sampler of a loader before each epoch.

    Args:
        repeats: every epoch has the batches of epoch 0.
    """

    def __init__(self, items: int, batch_size: int, share: Share = ALL, *, repeats: bool = False) -> None:
        super().__init__(items, batch_size, share)
        self.repeats = repeats
        # The epoch in Lightning's numbering, and the number of its batches so far in all processes together.
        self._epoch, self._batches = 0, 0
        # The excess of Lightning's number.
        self._ahead = 0
        self._resuming = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return the position of the iteration."""
        return {"epoch": self._epoch, "batches": self._batches, "ahead": self._ahead}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Makes the next iteration resume there. If another epoch is set, it begins with its first batch."""
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
                # 0, except that Lightning counts one too many with max_steps and a state from the end of an epoch.
                self._ahead += self.epoch - (self._epoch + 1)
        epoch = 0 if self.repeats else self.epoch - self._ahead
        for batch in range(first, len(self)):
            self._epoch, self._batches = self.epoch, (batch + 1) * self.share.ranks
            start = self._index(batch) * self.batch_size
            yield BatchKey(epoch, start, start + self.batch_size)


class BatchLoader(DataLoader[Any]):
    """Batches of a source, read in the calling process."""

    def __init__(self, source: BatchSource, sampler: FixedBatches) -> None:
        # A key is a whole batch (batch_size=None), from NumPy arrays: worker processes would only add copies. Without a
        # separate generator, the loader would draw from torch's global one in every epoch.
        super().__init__(source, batch_size=None, sampler=sampler, generator=torch.Generator())


class EpochLoader(BatchLoader):
    """The batches of training. Lightning's checkpoints contain the state, so that a run resumes within an epoch."""

    def __init__(self, source: BatchSource, sampler: EpochBatches) -> None:
        super().__init__(source, sampler)
        self.state_dict = sampler.state_dict
        self.load_state_dict = sampler.load_state_dict


def training_loader(source: BatchSource, batch_size: int, trainer: Trainer | None) -> DataLoader[Any]:
    """Return this process's share of the full batches of each epoch; with `overfit_batches`, always of epoch 0."""
    # The Trainer's attribute is set outside its class.
    repeats = trainer is not None and trainer.overfit_batches > 0  # pyright: ignore[reportAttributeAccessIssue]
    return EpochLoader(source, EpochBatches(len(source), batch_size, share_of(trainer), repeats=repeats))


def evaluation_loader(source: BatchSource, batch_size: int, trainer: Trainer | None) -> DataLoader[Any]:
    """Return this process's share of all items in order. The last batch can be shorter."""
    return BatchLoader(source, FixedBatches(len(source), batch_size, share_of(trainer)))
