"""Files are written completely or not at all, and only regular files are read."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from lit_ort.files import read_regular, remove_unfinished, whole_file
from tests.scripts import run_code


def write(path: Path, data: bytes) -> None:
    with whole_file(path) as file:
        file.write(data)


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.bin"
    with whole_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    write(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.bin"]


def test_the_previous_file_stays_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write(path, b"one")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"tw")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]


def test_folders_that_cannot_be_synchronized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronize = os.fsync

    def files_only(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        synchronize(handle)

    monkeypatch.setattr(os, "fsync", files_only)
    write(tmp_path / "a.bin", b"one")
    assert (tmp_path / "a.bin").read_bytes() == b"one"


def test_a_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "a.bin"
    link.symlink_to(tmp_path / "disk" / "a.bin")
    write(link, b"one")
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
def test_the_unfinished_file_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write(path, b"one")
    assert run_code([sys.executable, "-c", KILLED, str(path)]).returncode == -9
    assert path.read_bytes() == b"one"
    (unfinished,) = [entry for entry in tmp_path.iterdir() if entry != path]
    assert remove_unfinished(tmp_path) == []  # a young file can belong to a running process
    hour_ago = time.time() - 3600
    os.utime(unfinished, (hour_ago, hour_ago))
    assert remove_unfinished(tmp_path) == [unfinished]
    assert path.read_bytes() == b"one"


def test_files_in_progress_and_other_files_are_not_removed(tmp_path: Path) -> None:
    other = tmp_path / ".other.tmp"
    other.write_bytes(b"")
    hour_ago = time.time() - 3600
    with whole_file(tmp_path / "a.bin") as file:
        file.write(b"half")
        file.flush()
        (unfinished,) = [entry for entry in tmp_path.iterdir() if entry != other]
        for path in (unfinished, other):
            os.utime(path, (hour_ago, hour_ago))
        assert remove_unfinished(tmp_path) == []
    assert other.exists()
    assert remove_unfinished(tmp_path / "absent") == []


def test_without_locks_only_the_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    unfinished = tmp_path / f".a.bin.{'0' * 32}.tmp"
    unfinished.write_bytes(b"half")
    for hours, removed in ((1, []), (25, [unfinished])):
        long_ago = time.time() - 3600 * hours
        os.utime(unfinished, (long_ago, long_ago))
        assert remove_unfinished(tmp_path) == removed


def test_only_regular_files_up_to_a_limit_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="has 5 bytes, more than 4"):
        read_regular(path, 4)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is not a regular file"):
        read_regular(pipe, 5)
    with pytest.raises(OSError, match=r"regular file|directory"):
        read_regular(tmp_path, 5)
