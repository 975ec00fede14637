"""Reads and writes a shard, an HDF5 file of NVIDIA's BERT recipe.

A shard has N items of L tokens with at most P predictions, under the keys of
https://github.com/NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT, `create_pretraining_data.py`:

    input_ids[N, L], input_mask[N, L], segment_ids[N, L]   masked tokens; 1 on tokens; 1 on the second sentence
    masked_lm_positions[N, P], masked_lm_ids[N, P]         positions and ids of the tokens to predict, padded with 0
    next_sentence_labels[N]                                0 where the second sentence is the true next, 1 if random
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch

from lit_ort.errors import first_line_of
from lit_ort_tasks.data.batches import IGNORED, Batch
from lit_ort_tasks.errors import InputError, require

# The dimensions of each key and the type of the recipe: items N, tokens L, predictions P.
FORM = {
    "input_ids": ("NL", "i4"),
    "input_mask": ("NL", "i1"),
    "segment_ids": ("NL", "i1"),
    "masked_lm_positions": ("NP", "i4"),
    "masked_lm_ids": ("NP", "i4"),
    "next_sentence_labels": ("N", "i1"),
}

Rows = dict[str, np.ndarray]
# Errors of h5py for damaged files.
_DAMAGED = (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError)


@dataclass(frozen=True)
class Shard:
    """A file with checked keys and shapes: `items` of `length` tokens."""

    path: Path
    items: int
    length: int


# --- Reading ----------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as file:
            yield file
    except InputError:
        raise
    except _DAMAGED as error:
        raise InputError(
            f"{path}: cannot be read as HDF5: {first_line_of(error)}. It can be truncated or have another format; "
            "copy or prepare it again, or remove it from the folder."
        ) from error


def check_shard(path: Path) -> Shard:
    """Checks the keys, types and shapes of a shard, not its values.

    Raises:
        InputError: it is no file or no HDF5, lacks a key, or has another type or shape under a key.
    """
    sizes: dict[str, int] = {}
    require(path.is_file(), f"{path}: is no file, and a shard is one. Remove it from the folder.")
    with _opened(path) as file:
        for key, (dimensions, _) in FORM.items():
            values = file.get(key)
            if not isinstance(values, h5py.Dataset):
                raise InputError(
                    f"{path}: has no data under the key {key}; its keys are {', '.join(sorted(file)) or 'none'}. Give "
                    "shards with the keys of NVIDIA's BERT recipe."
                )
            require(
                np.issubdtype(values.dtype, np.integer),
                f"{path}: {key} has the type {values.dtype}, and must have whole numbers. Prepare the shard again.",
            )
            shape: tuple[int, ...] = values.shape or ()
            expected = tuple(sizes.get(name, size) for name, size in zip(dimensions, shape, strict=False))
            require(
                len(shape) == len(dimensions) and shape == expected,
                f"{path}: {key} has the shape {list(shape)}, and must have [{', '.join(dimensions)}] with the sizes of "
                f"the keys before it, {sizes}. Prepare the shard again.",
            )
            sizes |= dict(zip(dimensions, shape, strict=True))
    require(
        min(sizes.values()) >= 1,
        f"{path}: has the sizes {sizes}, and each must be at least 1. Remove the file from the folder.",
    )
    return Shard(path, sizes["N"], sizes["L"])


def read_shard(shard: Shard, vocabulary_size: int) -> Rows:
    """Return the values of a shard by key, with their stored types.

    Raises:
        InputError: a value is out of range for a model with this vocabulary.
    """
    limits = {
        "input_ids": (vocabulary_size, "the size of the vocabulary"),
        "masked_lm_ids": (vocabulary_size, "the size of the vocabulary"),
        "masked_lm_positions": (shard.length, "the length of an item"),
    }
    rows: Rows = {}
    with _opened(shard.path) as file:
        for key in FORM:
            values = file[key]
            assert isinstance(values, h5py.Dataset)
            rows[key] = values[()]
    for key, values in rows.items():
        limit, reason = limits.get(key, (2, "it is 0 or 1"))
        for value in (int(values.min()), int(values.max())):
            require(
                0 <= value < limit,
                f"{shard.path}: {key} contains {value}, and must be at least 0 and below {limit} ({reason}). Give the "
                "data.tokenizer or data.vocabulary_size of the shard, or prepare it again.",
            )
    return rows


def to_batch(rows: Rows) -> Batch:
    """Return rows of a shard as a batch; `lit_ort_tasks.data.pretraining_batches` has its form."""
    # [CLS] is at position 0 and never predicted, so the padding begins at the first 0.
    is_prediction = np.logical_and.accumulate(rows["masked_lm_positions"] != 0, axis=1)
    labels = np.full(rows["input_ids"].shape, IGNORED, dtype=np.int64)
    positions = rows["masked_lm_positions"][is_prediction]
    labels[np.nonzero(is_prediction)[0], positions] = rows["masked_lm_ids"][is_prediction]
    arrays = {
        "input_ids": rows["input_ids"],
        "token_type_ids": rows["segment_ids"],
        "attention_mask": rows["input_mask"],
        "labels": labels,
        "next_sentence_label": rows["next_sentence_labels"],
    }
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}


# --- Writing ----------------------------------------------------------------------------------------------------------


def write_shard(path: str | os.PathLike[str], batches: Iterable[Batch], max_predictions: int) -> None:
    """Writes the items of batches as one shard, in their order. The complete shard replaces a file at `path`.

    Args:
        batches: with the form in `lit_ort_tasks.data.pretraining_batches`, all of one length.
        max_predictions: P of the shard.

    Raises:
        InputError: an item has more predictions or one at position 0, or there are no batches.
    """
    parts = list(batches)
    require(bool(parts), f"{path}: no batches to write. Give at least one.")
    whole = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    positions, ids = _predictions(whole["labels"], max_predictions, str(path))
    rows = {
        "input_ids": whole["input_ids"],
        "input_mask": whole["attention_mask"],
        "segment_ids": whole["token_type_ids"],
        "masked_lm_positions": positions,
        "masked_lm_ids": ids,
        "next_sentence_labels": whole["next_sentence_label"],
    }
    # Readers ignore files with this suffix.
    unfinished = Path(f"{os.fspath(path)}.unfinished")
    with h5py.File(unfinished, "w") as file:
        for key, (_, dtype) in FORM.items():
            file.create_dataset(key, data=rows[key].astype(dtype), compression="gzip")
    unfinished.replace(path)


def _predictions(labels: np.ndarray, max_predictions: int, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and ids of the labels, int64[items, max_predictions] each, padded with 0."""
    predicted = labels != IGNORED
    most = int(predicted.sum(axis=1).max())
    require(
        most <= max_predictions,
        f"{path}: max_predictions={max_predictions}, and an item has {most} predictions. Give at least {most}.",
    )
    require(
        not predicted[:, 0].any(),
        f"{path}: item {int(predicted[:, 0].argmax())} predicts position 0, which a shard uses as padding. "
        "Leave the first token out of the labels.",
    )
    item, position = np.nonzero(predicted)
    column = (np.cumsum(predicted, axis=1) - 1)[item, position]
    positions, ids = np.zeros((2, len(labels), max_predictions), dtype=np.int64)
    positions[item, column] = position
    ids[item, column] = labels[item, position]
    return positions, ids
