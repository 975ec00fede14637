"""Shards of NVIDIA's BERT recipe: writing, reading as batches, shuffling, and the errors of invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from lit_ort_tasks.data import pretraining_shards
from lit_ort_tasks.data.batches import Batch
from lit_ort_tasks.data.pretraining_shard_files import FORM
from lit_ort_tasks.data.pretraining_shards import PretrainingShards, write_shard
from lit_ort_tasks.data.pretraining_text import PretrainingText
from lit_ort_tasks.errors import InputError

from tests.pretraining import (
    DOCUMENT_OF,
    ENDS,
    LENGTH,
    assert_same,
    check_resuming,
    epoch_of,
    joined,
    write_text,
    write_tokenizer,
)

ITEMS = (10, 7, 13, 6)
TOKENS, PREDICTIONS, VOCABULARY = 12, 3, 50


def rows(items: int = 10, first: int = 0, tokens: int = TOKENS) -> dict[str, np.ndarray]:
    """The content of a shard by key. The token at position 1 is the number of the item, from `first`."""
    random = np.random.default_rng(first)
    ids = random.integers(1, VOCABULARY, (items, tokens))
    ids[:, 1] = np.arange(first, first + items)
    positions = np.tile([2, 5, 0], (items, 1))
    positions[::2, 1:] = 0
    return {
        "input_ids": ids,
        "input_mask": np.ones_like(ids),
        "segment_ids": np.repeat([[0, 1]], tokens // 2, axis=1) * np.ones_like(ids),
        "masked_lm_positions": positions,
        "masked_lm_ids": np.where(positions > 0, random.integers(1, VOCABULARY, positions.shape), 0),
        "next_sentence_labels": np.arange(items) % 2,
    }


def write(path: Path, values: dict[str, np.ndarray]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, array in values.items():
            dtype = FORM[key][1] if key in FORM and array.dtype.kind == "i" else array.dtype
            file.create_dataset(key, data=array.astype(dtype), compression="gzip" if array.ndim else None)
    return path


def write_shards(folder: Path) -> Path:
    """Writes four shards: three for training with the items 0 to 29, and the last one with 30 to 35."""
    for number, (items, first) in enumerate(zip(ITEMS, np.cumsum([0, *ITEMS]).tolist(), strict=False)):
        write(folder / f"part_{number}.hdf5", rows(items, first))
    return folder


def shards(folder: Path, **options: Any) -> PretrainingShards:
    return PretrainingShards(**{"dir": folder, "vocabulary_size": VOCABULARY, "batch_size": 4, **options})


def numbers(batches: list[Batch]) -> list[int]:
    """The numbers of the items in the batches."""
    return torch.cat([batch["input_ids"][:, 1] for batch in batches]).tolist()


# --- Reading ----------------------------------------------------------------------------------------------------------


def test_a_row_becomes_an_item(tmp_path: Path) -> None:
    values = rows(4)
    values["masked_lm_positions"] = np.array([[2, 5, 0], [7, 0, 0], [1, 3, 11], [0, 0, 0]])
    values["masked_lm_ids"] = np.array([[9, 8, 0], [0, 0, 0], [7, 6, 5], [0, 0, 0]])
    write(tmp_path / "train" / "a.hdf5", values)
    data = shards(tmp_path / "train", valid_dir=tmp_path / "train", test_dir=tmp_path / "train")
    (batch,) = list(data.val_dataloader())
    assert all(value.dtype == torch.int64 for value in batch.values())
    assert batch["input_ids"].tolist() == values["input_ids"].tolist()
    assert batch["attention_mask"].tolist() == values["input_mask"].tolist()
    assert batch["token_type_ids"].tolist() == values["segment_ids"].tolist()
    assert batch["next_sentence_label"].tolist() == [0, 1, 0, 1]
    labels = [{k: label for k, label in enumerate(row) if label != -100} for row in batch["labels"].tolist()]
    assert labels == [{2: 9, 5: 8}, {7: 0}, {1: 7, 3: 6, 11: 5}, {}]


def test_written_batches_of_text_are_read_as_the_same_batches(tmp_path: Path) -> None:
    text = PretrainingText(
        train_file=write_text(tmp_path / "text.txt"),
        tokenizer=write_tokenizer(tmp_path / "tokenizer"),
        max_length=LENGTH,
        batch_size=8,
        eval_batch_size=8,
        cache_dir=tmp_path / "cache",
    )
    (tmp_path / "shards").mkdir()
    batches = [epoch_of(text, epoch) for epoch in (0, 1)]
    for number, epoch in enumerate(batches):
        write_shard(tmp_path / "shards" / f"{number}.h5", epoch, max_predictions=9)
    data = PretrainingShards(dir=tmp_path / "shards", tokenizer=tmp_path / "tokenizer", batch_size=8, eval_batch_size=8)
    assert_same(list(data.val_dataloader()), batches[1])
    arguments = data.task_arguments
    assert len(arguments.pop("tokenizer")) == len(text.task_arguments["tokenizer"])
    assert arguments == {"vocabulary_size": len(DOCUMENT_OF), "max_length": LENGTH}
    assert arguments.items() < text.task_arguments.items()
    assert data.state_dict() == text.state_dict()
    with h5py.File(tmp_path / "shards" / "0.h5") as file:
        written: dict[str, Any] = dict(file)
        assert {key: array.dtype.str[1:] for key, array in written.items()} == {key: FORM[key][1] for key in FORM}
        assert written["masked_lm_ids"].shape == (len(joined(batches[0])["labels"]), 9)
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == ["0.h5", "1.h5"]


def test_the_last_shard_is_held_out(tmp_path: Path) -> None:
    data = shards(write_shards(tmp_path / "s"))
    assert numbers(list(data.val_dataloader())) == numbers(list(data.test_dataloader())) == list(range(30, 36))
    assert set(numbers(epoch_of(data, 0) + epoch_of(data, 1) + epoch_of(data, 2))) == set(range(30))
    write(tmp_path / "v" / "v.h5", rows(3, first=40))
    separate = shards(tmp_path / "s", valid_dir=tmp_path / "v")
    assert numbers(list(separate.val_dataloader())) == [40, 41, 42]
    assert numbers(list(separate.test_dataloader())) == list(range(30, 36))
    both = shards(tmp_path / "s", valid_dir=tmp_path / "v", test_dir=tmp_path / "v")
    assert len(both.splits.train) == 36


def test_every_item_is_read_once_an_epoch_shard_by_shard(tmp_path: Path) -> None:
    data = shards(write_shards(tmp_path / "s"), batch_size=1)
    shard_of = np.repeat(range(3), ITEMS[:3])
    orders: list[list[int]] = []
    for epoch in range(8):
        order = numbers(epoch_of(data, epoch))
        assert sorted(order) == list(range(30))
        shards_in_order = shard_of[order]
        assert np.count_nonzero(np.diff(shards_in_order)) == 2
        orders.append(shards_in_order[np.sort(np.unique(shards_in_order, return_index=True)[1])].tolist())
        assert order != sorted(order)
    assert len({tuple(order) for order in orders}) > 2


def test_shards_of_one_size_are_shuffled_differently(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "s" / f"{number}.hdf5", rows(12, first=12 * number))
    order = np.array(numbers(epoch_of(shards(tmp_path / "s"), 0)))
    assert (order[:12] % 12).tolist() != (order[12:] % 12).tolist()


def test_batches_follow_from_the_seed_and_the_epoch(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s")
    first = epoch_of(shards(folder), 1)
    assert [len(batch["labels"]) for batch in first] == [4] * 7  # of 30 items
    again = shards(folder)
    epoch_of(again, 0)
    assert_same(first, epoch_of(again, 1))
    assert numbers(epoch_of(again, 0)) != numbers(first)
    assert numbers(epoch_of(shards(folder, seed=2), 1)) != numbers(first)
    larger = numbers(epoch_of(shards(folder, batch_size=29), 1))  # of three shards
    assert larger[:28] == numbers(first)
    assert [len(batch["labels"]) for batch in shards(folder, eval_batch_size=4).val_dataloader()] == [4, 2]


def test_one_shard_at_a_time_is_read_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def record(shard: Any, vocabulary_size: int) -> Any:
        names.append(shard.path.name)
        return original(shard, vocabulary_size)

    original = pretraining_shards.read_shard
    monkeypatch.setattr(pretraining_shards, "read_shard", record)
    data = shards(write_shards(tmp_path / "s"))
    data.setup("fit")
    assert names == []
    batches = iter(data.train_dataloader())
    next(batches)
    assert len(names) == 1
    list(batches)
    assert sorted(names) == ["part_0.hdf5", "part_1.hdf5", "part_2.hdf5"]


@pytest.mark.parametrize("limits", ENDS)
def test_a_resumed_run_has_the_batches_of_an_uninterrupted_one(tmp_path: Path, limits: dict[str, int]) -> None:
    folder = write_shards(tmp_path / "s")
    check_resuming(lambda: shards(folder, batch_size=9), tmp_path, limits)


def test_a_checkpoint_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s")
    with pytest.raises(InputError, match="tokenizer of 50 tokens, and the data has another one, of 60"):
        shards(folder, vocabulary_size=60).load_state_dict(shards(folder).state_dict())


# --- Invalid input ----------------------------------------------------------------------------------------------------


def test_nothing_is_read_before_it_is_needed(tmp_path: Path) -> None:
    data = PretrainingShards()
    with pytest.raises(InputError, match=r"data\.dir=null: must be a folder"):
        data.setup("fit")
    PretrainingShards(dir=tmp_path / "absent")


@pytest.mark.parametrize("name", ["dir", "valid_dir", "test_dir"])
def test_folders_without_shards_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = write_shards(tmp_path / "s")
    with pytest.raises(InputError, match=rf"data\.{name}=.*absent: no such folder"):
        shards(folder, **{name: tmp_path / "absent"}).setup("fit")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    with pytest.raises(InputError, match=rf"data\.{name}=.*empty: has no file \*\.hdf5 or \*\.h5"):
        shards(folder, **{name: tmp_path / "empty"}).setup("fit")


def test_one_shard_cannot_be_held_out(tmp_path: Path) -> None:
    write(tmp_path / "s" / "a.hdf5", rows())
    with pytest.raises(InputError, match=r"data\.dir=.*has 1 shard.*2 are needed"):
        shards(tmp_path / "s").setup("fit")


def test_the_vocabulary_must_be_known(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s")
    with pytest.raises(InputError, match=r"data\.tokenizer=null and data\.vocabulary_size=null"):
        shards(folder, vocabulary_size=None).setup("fit")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(InputError, match=rf"data\.vocabulary_size=50: is below the {len(DOCUMENT_OF)} tokens"):
        shards(folder, tokenizer=tokenizer).setup("fit")
    padded = shards(folder, tokenizer=tokenizer, vocabulary_size=len(DOCUMENT_OF) + 6)
    assert padded.task_arguments["vocabulary_size"] == len(DOCUMENT_OF) + 6


@pytest.mark.parametrize("name", ["batch_size", "eval_batch_size", "vocabulary_size"])
@pytest.mark.parametrize("value", [0, 1.5, "many"])
def test_invalid_numbers_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"data.{name}={value!r}: must be a whole number"):
        PretrainingShards(**{name: value})  # pyright: ignore[reportArgumentType]


def test_fewer_items_than_one_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.batch_size=31: training has only 30 items"):
        shards(write_shards(tmp_path / "s"), batch_size=31).setup("fit")


def test_truncated_files_are_refused_by_name(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "s") / "part_1.hdf5"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"some text"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"part_1\.hdf5: cannot be read as HDF5: "):
            shards(tmp_path / "s").setup("fit")


def test_damaged_values_are_refused_when_they_are_read(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "s") / "part_1.hdf5"
    with h5py.File(path, "r+") as file:
        chunk = file["input_ids"].id.get_chunk_info(0)
        start, size = chunk.byte_offset, chunk.size
    content = bytearray(path.read_bytes())
    content[start : start + size] = bytes(size)
    path.write_bytes(content)
    data = shards(tmp_path / "s")
    data.setup("fit")
    with pytest.raises(InputError, match=r"part_1\.hdf5: cannot be read as HDF5: "):
        epoch_of(data, 0)


@pytest.mark.parametrize("key", FORM)
def test_missing_keys_are_refused_by_name(tmp_path: Path, key: str) -> None:
    values = rows()
    del values[key]
    write(write_shards(tmp_path / "s") / "part_1.hdf5", values | {"other": np.arange(3)})
    with pytest.raises(InputError, match=rf"part_1\.hdf5: has no data under the key {key}; its keys are .*other"):
        shards(tmp_path / "s").setup("fit")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("input_ids", np.ones(10, dtype=int), r"the shape \[10\], and must have \[N, L\]"),
        ("input_mask", np.ones((9, TOKENS), dtype=int), r"the shape \[9, 12\].*'N': 10, 'L': 12"),
        ("segment_ids", np.ones((10, 11), dtype=int), r"the shape \[10, 11\].*'N': 10, 'L': 12"),
        ("masked_lm_positions", np.ones((8, 3), dtype=int), r"the shape \[8, 3\].*'N': 10"),
        ("masked_lm_ids", np.ones((10, 4), dtype=int), r"the shape \[10, 4\].*'P': 3"),
        ("next_sentence_labels", np.ones((10, 1), dtype=int), r"the shape \[10, 1\], and must have \[N\]"),
        ("next_sentence_labels", np.array(1), r"the shape \[\], and must have \[N\]"),
        ("input_ids", np.ones((10, TOKENS)), "the type float64, and must have whole numbers"),
    ],
)
def test_wrong_shapes_and_types_are_refused(tmp_path: Path, key: str, value: np.ndarray, message: str) -> None:
    write(write_shards(tmp_path / "s") / "part_1.hdf5", rows() | {key: value})
    with pytest.raises(InputError, match=rf"part_1\.hdf5: {key} has {message}"):
        shards(tmp_path / "s").setup("fit")


def test_keys_without_data_and_shards_without_items_are_refused(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "s") / "part_1.hdf5"
    with h5py.File(path, "r+") as file:
        del file["input_ids"]
        file["input_ids"] = h5py.Empty("i4")
    with pytest.raises(InputError, match=r"part_1\.hdf5: input_ids has the shape \[\]"):
        shards(tmp_path / "s").setup("fit")
    write(path, {key: values[:0] for key, values in rows().items()})
    with pytest.raises(InputError, match=r"part_1\.hdf5: has the sizes {'N': 0, 'L': 12, 'P': 3}"):
        shards(tmp_path / "s").setup("fit")


@pytest.mark.parametrize("name", ["part_1.hdf5", "part_3.hdf5"])
def test_shards_of_different_lengths_are_refused(tmp_path: Path, name: str) -> None:
    write(write_shards(tmp_path / "s") / name, rows(tokens=8))
    message = rf"{name}: input_ids has items of 8 tokens, and those of .*part_0\.hdf5 have 12"
    with pytest.raises(InputError, match=message):
        shards(tmp_path / "s").setup("fit")


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("input_ids", VOCABULARY, VOCABULARY),
        ("input_ids", -1, VOCABULARY),
        ("masked_lm_ids", VOCABULARY + 3, VOCABULARY),
        ("masked_lm_ids", -2, VOCABULARY),
        ("masked_lm_positions", TOKENS, TOKENS),
        ("masked_lm_positions", -1, TOKENS),
        ("input_mask", 2, 2),
        ("segment_ids", -1, 2),
        ("next_sentence_labels", 2, 2),
    ],
)
def test_values_out_of_range_are_refused_when_their_shard_is_read(
    tmp_path: Path, key: str, value: int, limit: int
) -> None:
    values = rows()
    values[key].flat[5] = value
    write(write_shards(tmp_path / "s") / "part_1.hdf5", values)
    data = shards(tmp_path / "s")
    data.setup("fit")
    with pytest.raises(InputError, match=rf"part_1\.hdf5: {key} contains {value}, and must be .* below {limit} "):
        epoch_of(data, 0)


def test_batches_that_do_not_fit_a_shard_are_not_written(tmp_path: Path) -> None:
    data = shards(write_shards(tmp_path / "s"))
    batches = epoch_of(data, 0)
    path = tmp_path / "s" / "new.hdf5"
    with pytest.raises(InputError, match=r"new\.hdf5: max_predictions=1, and an item has 2 predictions"):
        write_shard(path, batches, max_predictions=1)
    with pytest.raises(InputError, match=r"new\.hdf5: no batches"):
        write_shard(path, [], max_predictions=1)
    batches[0]["labels"][2, 0] = 7
    with pytest.raises(InputError, match=r"new\.hdf5: item 2 predicts position 0"):
        write_shard(path, batches, max_predictions=3)
    assert not path.exists()
