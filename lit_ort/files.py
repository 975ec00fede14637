"""Files that are either complete or absent, even if the process that writes them is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows, where an open file can't be removed
    fcntl = None

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
# The longest time between the creation of a file and its lock, and between two writes to it.
_YOUNG_SECONDS, _SILENT_SECONDS = 60, 24 * 3600
# Errors of folders that can't be written to disk or read, and of file systems without locks.
_NO_FOLDERS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.EBADF})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a file for writing that replaces the file at a path when it is complete and on disk.

    It is written next to the path, on the same file system, and removed if writing fails.

    Raises:
        OSError: it can't be written.
    """
    # A symbolic link stays a link.
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with unfinished.open("xb") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    _sync(target.parent)


def open_to_others(folder: Path) -> None:
    """Gives a folder of `tempfile.mkdtemp`, which is closed to other users, the permissions of any new folder."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the bytes of a regular file. Devices and pipes, whose reading could block forever, are rejected.

    Args:
        path: the file's path.
        limit: the largest number of bytes.

    Raises:
        OSError: it can't be read, is not a regular file, or is larger.
    """
    # Without O_NONBLOCK, opening a pipe waits for its other end.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"has {status.st_size} bytes, more than {limit}", str(path))
        return file.read(limit)


def remove_unfinished(folder: str | os.PathLike[str]) -> list[Path]:
    """Removes incomplete files of processes that have ended from a folder. Returns the removed paths."""
    try:
        paths = [path for path in Path(folder).iterdir() if _UNFINISHED.fullmatch(path.name) and path.is_file()]
    except (FileNotFoundError, PermissionError):
        return []
    return [path for path in paths if _is_left_over(path) and _removed(path)]


def _lock(file: IO[bytes]) -> None:
    """Locks a file until it is closed or the process ends."""
    if fcntl is not None:
        # Some network file systems have no locks; there only the age decides whether a file is left over.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_left_over(path: Path) -> bool:
    age = 0.0
    try:
        age = time.time() - path.stat().st_mtime
        if age < _YOUNG_SECONDS:
            return False
        if fcntl is None:
            return True
        # Locks of NFS need a file that is open for writing.
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _NO_LOCKS and age > _SILENT_SECONDS
    return True


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Writes the names in a folder to disk (POSIX only; elsewhere folders can't be opened)."""
    if os.name != "posix":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # The file is in its place already.
        if error.errno not in _NO_FOLDERS:
            raise
