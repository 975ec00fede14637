"""Files that are whole or not there, and files that may be read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_ort.files import read_regular, remove_unfinished, whole_file


def written(path: Path, data: bytes) -> None:
    with whole_file(path) as file:
        file.write(data)


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.bin"
    with whole_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    written(path, b"two")
    assert path.read_bytes() == b"two"
    assert [found.name for found in path.parent.iterdir()] == ["a.bin"]


def test_what_was_there_stays_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    written(path, b"one")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"tw")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"one"
    assert [found.name for found in tmp_path.iterdir()] == ["a.bin"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "a.bin"
    link.symlink_to(tmp_path / "disk" / "a.bin")
    written(link, b"one")
    assert link.is_symlink()
    assert (tmp_path / "disk" / "a.bin").read_bytes() == b"one"


KILLED = """
import os, signal, sys
from lit_ort.files import whole_file
with whole_file(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_the_file_before_and_its_rest_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    written(path, b"one")
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)]).returncode == -9
    assert path.read_bytes() == b"one"
    (left,) = [found for found in tmp_path.iterdir() if found != path]
    assert remove_unfinished(tmp_path) == []  # it may have just been made by a process that goes on
    hour_ago = time.time() - 3600
    os.utime(left, (hour_ago, hour_ago))
    assert remove_unfinished(tmp_path) == [left]
    assert path.read_bytes() == b"one"


def test_files_that_are_being_written_and_others_stay(tmp_path: Path) -> None:
    other = tmp_path / ".other.tmp"
    other.write_bytes(b"")
    hour_ago = time.time() - 3600
    with whole_file(tmp_path / "a.bin") as file:
        file.write(b"half")
        file.flush()
        (unfinished,) = [found for found in tmp_path.iterdir() if found != other]
        for path in (unfinished, other):
            os.utime(path, (hour_ago, hour_ago))
        assert remove_unfinished(tmp_path) == []
    assert other.exists()
    assert remove_unfinished(tmp_path / "absent") == []


def test_only_regular_files_of_a_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="has 5 bytes, more than 4"):
        read_regular(path, 4)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is no regular file"):
        read_regular(pipe, 5)
    with pytest.raises(OSError, match=r"regular file|directory"):
        read_regular(tmp_path, 5)
