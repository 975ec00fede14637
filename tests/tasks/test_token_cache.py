"""The cache of tokenized data: keys from the content, and no incomplete entries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lit_ort_tasks.data.token_cache import Arrays, cached_arrays, content_key
from lit_ort_tasks.errors import InputError


def test_a_key_depends_on_the_texts_their_bounds_and_the_settings() -> None:
    keys = {
        content_key(["ab", "c"], block=1),
        content_key(["a", "bc"], block=1),
        content_key(["ab"], block=1),
        content_key(["ab", "c"], block=2),
        content_key(["ab", "c"], size=1),
    }
    assert len(keys) == 5
    assert content_key(iter(["ab", "c"]), a=1, b=2) == content_key(["ab", "c"], b=2, a=1)


def test_arrays_are_created_once_and_memory_mapped(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> Arrays:
        calls.append(1)
        return {"ids": np.arange(5, dtype=np.int32), "starts": np.zeros(0, dtype=np.int64)}

    for _ in range(2):
        arrays = cached_arrays(tmp_path, "key", make)
        assert isinstance(arrays["ids"], np.memmap)
        assert arrays["ids"].tolist() == [0, 1, 2, 3, 4]
        assert arrays["ids"].dtype == np.int32
        assert not arrays["ids"].flags.writeable
        assert len(arrays["starts"]) == 0
    assert len(calls) == 1


def test_a_failed_write_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = np.save

    def fails_at_the_second(path: Path, array: np.ndarray) -> None:
        if Path(path).stem == "second":
            raise OSError(28, "No space left on device")
        save(path, array)

    arrays = {"first": np.arange(3), "second": np.arange(3)}
    monkeypatch.setattr(np, "save", fails_at_the_second)
    with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
        cached_arrays(tmp_path, "key", lambda: arrays)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(np, "save", save)
    assert sorted(cached_arrays(tmp_path, "key", lambda: arrays)) == ["first", "second"]


def test_a_faster_run_is_no_error(tmp_path: Path) -> None:
    def make() -> Arrays:
        cached_arrays(tmp_path, "key", lambda: {"ids": np.arange(2)})
        return {"ids": np.arange(2)}

    assert cached_arrays(tmp_path, "key", make)["ids"].tolist() == [0, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"data\.cache_dir=.*file/cache: cannot be written"):
        cached_arrays(tmp_path / "file" / "cache", "key", lambda: {})


def test_an_entry_has_the_permissions_of_a_new_folder(tmp_path: Path) -> None:
    cached_arrays(tmp_path, "key", lambda: {"ids": np.arange(3)})
    (tmp_path / "other").mkdir()
    assert (tmp_path / "key").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_entry_that_is_closed_to_this_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached_arrays(tmp_path, "key", lambda: {"ids": np.arange(3)})

    def closed(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lit_ort_tasks.data.token_cache.read_regular", closed)
    with pytest.raises(InputError, match=r"data\.cache_dir=.*/key cannot be read \(Permission denied\)"):
        cached_arrays(tmp_path, "key", lambda: {"ids": np.arange(3)})


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("ids.npy", flip, "ids.npy doesn't match its checksum"),
        ("ids.npy", Path.unlink, "ids.npy is missing"),
        ("ids.npy", replace_by_pipe, "ids.npy is missing"),
        ("ids.npy", lambda path: path.write_bytes(b""), "ids.npy doesn't match its checksum"),
        ("checksums.json", Path.unlink, "No such file"),
        ("checksums.json", replace_by_pipe, "is not a regular file"),
        ("checksums.json", lambda path: path.write_text("[" * 100_000), "nested too deeply|Expecting"),
        ("checksums.json", lambda path: path.write_text("[1]"), "is no list of checksums"),
        ("checksums.json", lambda path: path.write_text("{}"), "is no list of checksums"),
    ],
)
def test_a_damaged_entry_is_named_and_written_again(
    tmp_path: Path, name: str, damage: Callable[[Path], object], reason: str
) -> None:
    def read() -> list[int]:
        return cached_arrays(tmp_path, "key", lambda: {"ids": np.arange(3)})["ids"].tolist()

    read()
    damage(tmp_path / "key" / name)
    with pytest.warns(UserWarning, match=rf"key is damaged \(.*({reason})"):
        assert read() == [0, 1, 2]
    assert read() == [0, 1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
