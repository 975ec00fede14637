"""Files that are there as a whole or not at all, whatever ends the process that writes them."""

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
except ImportError:  # Windows, where a file that is open can't be removed anyway
    fcntl = None

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
# Between making a file and locking it.
_YOUNG_SECONDS = 60


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write, which takes its place once it is whole and on disk; what was there before stays until then.

    It is written beside its place, on the same file system, and gone again if writing fails.

    Raises:
        OSError: it can't be written.
    """
    # A link stays one.
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


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of a regular file; a pipe in its place, which would wait for ever, or a device is not read.

    Args:
        path: of the file.
        limit: the most bytes that it may have.

    Raises:
        OSError: it can't be read, is another kind of file, or is larger.
    """
    # Opening a pipe waits for its other end unless it is told not to.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        if found.st_size > limit:
            raise OSError(errno.EFBIG, f"has {found.st_size} bytes, more than {limit}", str(path))
        return file.read(limit)


def remove_unfinished(folder: str | os.PathLike[str]) -> list[Path]:
    """Removes what processes that ended left of files in a folder. Returns what was removed."""
    try:
        found = [path for path in Path(folder).iterdir() if _UNFINISHED.fullmatch(path.name) and path.is_file()]
    except FileNotFoundError:
        return []
    return [path for path in found if _is_left_over(path) and _removed(path)]


def _lock(file: IO[bytes]) -> None:
    """Held until the file is closed, by the end of the process too."""
    if fcntl is not None:
        # Some network file systems have none; there a file counts as left over by its age alone.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_left_over(path: Path) -> bool:
    try:
        if time.time() - path.stat().st_mtime < _YOUNG_SECONDS:
            return False
        if fcntl is None:
            return True
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Puts the names in a folder on disk (POSIX; elsewhere folders can't be opened)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
