"""Loaders that go on within an epoch, with the next batch in the same order, and share batches among processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler, default_collate


@dataclass(frozen=True)
class BatchKey:
    """The items from place `start` up to `stop` in the order of an epoch."""

    epoch: int
    start: int
    stop: int


class BatchSource(Dataset[Any]):
    """Items that are read a batch at a time by a `BatchKey`, and may be others, or in another order, in every epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """Items of an epoch; the same for every epoch."""

    @abstractmethod
    def __getitem__(self, key: BatchKey) -> Any:
        """A batch, all of whose tensors are collated."""


class Shuffled(BatchSource):
    """The items of a dataset in an order that follows from seed and epoch alone.

    Args:
        items: by number.
        seed: None for the order of their numbers, in every epoch.
    """

    def __init__(self, items: Dataset[Any], seed: int | None) -> None:
        self._items, self._seed = items, seed
        self._order: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self._items)  # pyright: ignore[reportArgumentType] - those with a length

    def __getitem__(self, key: BatchKey) -> Any:
        return default_collate([self._items[number] for number in self._numbers(key.epoch)[key.start : key.stop]])

    def _numbers(self, epoch: int) -> Sequence[int]:
        if self._seed is None:
            return range(len(self))
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(hash((self._seed, epoch)) & (2**63 - 1))
            self._order = epoch, torch.randperm(len(self), generator=generator).tolist()
        return self._order[1]


class Ready(BatchSource):
    """A dataset whose items are batches already, read one at a time, in order."""

    def __init__(self, batches: Dataset[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)  # pyright: ignore[reportArgumentType] - those with a length

    def __getitem__(self, key: BatchKey) -> Any:
        return self._batches[key.start]


@dataclass(frozen=True)
class Share:
    """Which batches a process takes: of `ranks` processes, number `rank` takes every `ranks`-th from its own number on.

    All take as many.
    """

    ranks: int = 1
    rank: int = 0


ALL = Share()


def share_of(trainer: Trainer | None) -> Share:
    """What a Trainer's processes read: those that hold parts of one model read the same batches."""
    given = None if trainer is None else trainer.distributed_sampler_kwargs
    return ALL if given is None else Share(given["num_replicas"], given["rank"])


# Lightning replaces other samplers: where there are several processes, those that are no DistributedSampler, and with
# overfit_batches those that are no SequentialSampler.
class FixedBatches(DistributedSampler[BatchKey], SequentialSampler):  # pyright: ignore[reportGeneralTypeIssues]
    """The same batches at every epoch; the last one is shorter where the items don't divide. Where the batches don't
    divide by the processes, the first ones are read again.
    """

    def __init__(self, items: int, batch_size: int, share: Share = ALL) -> None:
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

    def __iter__(self) -> Iterator[BatchKey]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for batch in range(len(self)):
            start = self._place(batch) % self._batches_of_all() * self.batch_size
            yield BatchKey(self.epoch, start, min(start + self.batch_size, self.items))

    def _batches_of_all(self) -> int:
        return -(-self.items // self.batch_size)

    def _place(self, batch: int) -> int:
        """Among the batches of all processes, of this one's batch."""
        return batch * self.share.ranks + self.share.rank


class EpochBatches(FixedBatches):
    """Full batches of the epoch that was set last. Lightning sets it on the sampler of a loader before each epoch.

    Args:
        repeats: every epoch has the batches of epoch 0.
    """

    def __init__(self, items: int, batch_size: int, share: Share = ALL, *, repeats: bool = False) -> None:
        super().__init__(items, batch_size, share)
        self.repeats = repeats
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
        epoch = 0 if self.repeats else self.epoch - self._ahead
        for batch in range(first, len(self)):
            self._epoch, self._batches = self.epoch, (batch + 1) * self.share.ranks
            start = self._place(batch) * self.batch_size
            yield BatchKey(epoch, start, start + self.batch_size)


class BatchLoader(DataLoader[Any]):
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


def training_loader(source: BatchSource, batch_size: int, trainer: Trainer | None) -> DataLoader[Any]:
    """This process's share of the full batches of an epoch; with `Trainer(overfit_batches=...)` always of epoch 0."""
    # The Trainer's attribute is set outside its class.
    repeats = trainer is not None and trainer.overfit_batches > 0  # pyright: ignore[reportAttributeAccessIssue]
    return EpochLoader(source, EpochBatches(len(source), batch_size, share_of(trainer), repeats=repeats))


def evaluation_loader(source: BatchSource, batch_size: int, trainer: Trainer | None) -> DataLoader[Any]:
    """All items, in order, the last batch shorter where they don't divide; this process's share of them."""
    return BatchLoader(source, FixedBatches(len(source), batch_size, share_of(trainer)))
