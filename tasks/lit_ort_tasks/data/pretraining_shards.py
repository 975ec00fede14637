"""BERT pre-training batches from a folder of shards, the HDF5 files of NVIDIA's BERT recipe.

`lit_ort_tasks.data.pretraining_shard_files` has their form.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lit_ort_tasks.data.batches import Batch
from lit_ort_tasks.data.loaders import BatchKey, BatchSource
from lit_ort_tasks.data.pretraining_batches import PretrainingData, Splits
from lit_ort_tasks.data.pretraining_shard_files import Rows, Shard, check_shard, read_shard, to_batch, write_shard
from lit_ort_tasks.data.tokenization import load_tokenizer
from lit_ort_tasks.errors import InputError, require, require_whole

__all__ = ["PretrainingShards", "ShardBatches", "write_shard"]

SUFFIXES = (".hdf5", ".h5")


class ShardBatches(BatchSource):
    """The items of shards. The values of a shard are read and checked when a batch needs them.

    Args:
        seed: with the epoch, it determines the order of the shards and of the items within each. Every shard is read
            once an epoch. None keeps the orders on disk.
    """

    def __init__(self, shards: Sequence[Shard], vocabulary_size: int, seed: int | None) -> None:
        self.shards = shards
        self.vocabulary_size = vocabulary_size
        self.seed = seed
        self._latest: tuple[int, Rows] | None = None

    def __len__(self) -> int:
        return sum(shard.items for shard in self.shards)

    def __getitem__(self, key: BatchKey) -> Batch:
        order = self._order(key.epoch, 0, len(self.shards))
        stops = np.cumsum([self.shards[shard].items for shard in order])
        parts: list[Batch] = []
        for shard, stop in zip(order.tolist(), stops.tolist(), strict=True):
            start = stop - self.shards[shard].items
            if start < key.stop and key.start < stop:
                chosen = slice(max(key.start - start, 0), key.stop - start)
                items = self._order(key.epoch, 1 + shard, self.shards[shard].items)[chosen]
                parts.append(to_batch({name: values[items] for name, values in self._rows(shard).items()}))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _order(self, epoch: int, which: int, count: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(count)
        return np.random.default_rng((self.seed, epoch, which)).permutation(count)

    def _rows(self, shard: int) -> Rows:
        """Return the values of a shard; the last shard stays in memory."""
        if self._latest is None or self._latest[0] != shard:
            self._latest = None  # not two in memory
            self._latest = (shard, read_shard(self.shards[shard], self.vocabulary_size))
        return self._latest[1]


class PretrainingShards(PretrainingData):
    """BERT pre-training batches from the shards in a folder: its files *.hdf5 and *.h5.

    One shard of each split is in memory, as in the recipe. Seed and epoch determine the order of the shards in training
    and of the items in each. A batch can have items of two consecutive shards.

    Args:
        dir: the shards for training; required.
        valid_dir, test_dir: shards for validation and test; None holds out the last shard of `dir` by name (one shard
            for both).
        tokenizer: of the shards: a folder or a model on the hub.
        vocabulary_size: of the model; None is the tokenizer's. One of the two is required.

    Raises:
        InputError: an option is out of range; when the data is read, also if an option, a folder or a shard is missing,
            a file is no shard, or items have different lengths; when a shard is read, also if a value is out of range.
    """

    def __init__(
        self,
        *,
        dir: str | os.PathLike[str] | None = None,
        valid_dir: str | os.PathLike[str] | None = None,
        test_dir: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        vocabulary_size: int | None = None,
        batch_size: int = 16,
        eval_batch_size: int = 32,
        seed: int = 1,
    ) -> None:
        super().__init__(batch_size=batch_size, eval_batch_size=eval_batch_size, seed=seed)
        if vocabulary_size is not None:
            require_whole("data", vocabulary_size=vocabulary_size)
        self.dir = dir
        self.valid_dir = valid_dir
        self.test_dir = test_dir
        self.tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size

    def read(self) -> Splits:
        if self.dir is None:
            raise InputError("data.dir=null: must be a folder with shards of NVIDIA's BERT recipe (*.hdf5). Give one.")
        train = _shards("dir", self.dir)
        valid = None if self.valid_dir is None else _shards("valid_dir", self.valid_dir)
        test = None if self.test_dir is None else _shards("test_dir", self.test_dir)
        if valid is None or test is None:
            require(
                len(train) >= 2,
                f"data.dir={self.dir}: has 1 shard, and 2 are needed: the last one is held out for validation or test. "
                "Give more, or data.valid_dir and data.test_dir.",
            )
            train, held_out = train[:-1], train[-1:]
            valid, test = valid or held_out, test or held_out
        for shard in (*train, *valid, *test):
            require(
                shard.length == train[0].length,
                f"{shard.path}: input_ids has items of {shard.length} tokens, and those of {train[0].path} have "
                f"{train[0].length}. Give shards of one length.",
            )
        tokenizer = None if self.tokenizer is None else load_tokenizer(self.tokenizer)
        vocabulary_size = self._vocabulary_size(None if tokenizer is None else len(tokenizer))
        return Splits(
            train=ShardBatches(train, vocabulary_size, self.seed),
            valid=ShardBatches(valid, vocabulary_size, None),
            test=ShardBatches(test, vocabulary_size, None),
            tokenizer=tokenizer,
            vocabulary_size=vocabulary_size,
            max_length=train[0].length,
        )

    def _vocabulary_size(self, of_tokenizer: int | None) -> int:
        size = self.vocabulary_size or of_tokenizer
        if size is None:
            raise InputError(
                "data.tokenizer=null and data.vocabulary_size=null: one of the two is needed, for the range of "
                "ids. Give that of the shards (30522 for bert-base-uncased)."
            )
        require(
            of_tokenizer is None or size >= of_tokenizer,
            f"data.vocabulary_size={size}: is below the {of_tokenizer} tokens of data.tokenizer={self.tokenizer}. Give "
            "at least as many, or leave it out.",
        )
        return size


def _shards(option: str, folder: str | os.PathLike[str]) -> list[Shard]:
    root = Path(os.path.expanduser(folder))
    require(root.is_dir(), f"data.{option}={root}: no such folder. Give a folder with shards of NVIDIA's BERT recipe.")
    paths = sorted(path for path in root.iterdir() if path.suffix in SUFFIXES and path.is_file())
    require(bool(paths), f"data.{option}={root}: has no file *.hdf5 or *.h5. Give a folder with shards.")
    return [check_shard(path) for path in paths]
