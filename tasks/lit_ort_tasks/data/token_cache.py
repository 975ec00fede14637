"""A cache of tokenized data on disk, with the digest of its source as key. Arrays are memory-mapped.

An entry is a folder of .npy files and their checksums. A complete entry is renamed to its final name, so that a
stopped run leaves no incomplete one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lit_ort.files import open_to_others, read_regular
from lit_ort_tasks.errors import InputError

CHECKSUMS = "checksums.json"
LARGEST_LIST = 2**20
Arrays = Mapping[str, np.ndarray]


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/lit_ort/tokens`, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_ort" / "tokens"


def content_key(texts: Iterable[str], **settings: Any) -> str:
    """Return the key of data from these texts with these settings (JSON values)."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def cached_arrays(folder: str | os.PathLike[str] | None, key: str, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of an entry, memory-mapped and read-only.

    A missing entry is written, and so is a damaged one, with a warning.

    Args:
        folder: of the entries; None is `default_folder()`.
        key: of the entry.
        make: creates the arrays of a missing entry.

    Raises:
        InputError: the folder can't be written, or the entry is closed to this user.
    """
    root = default_folder() if folder is None else Path(folder).expanduser()
    entry = root / key
    try:
        if entry.is_dir():
            return _read(entry)
    except PermissionError as error:
        raise InputError(
            f"data.cache_dir={root}: {entry} cannot be read ({error.strerror}). Ask its owner for the permission to "
            "read it, or give another folder."
        ) from error
    except (OSError, ValueError) as error:
        warnings.warn(f"{entry} is damaged ({error}); its text is tokenized again.", stacklevel=2)
    arrays = make()
    with _writing(root):
        _write(root, entry, arrays)
    return _read(entry)


def _read(entry: Path) -> Arrays:
    """Raises OSError or ValueError for a damaged entry."""
    try:
        sums = json.loads(read_regular(entry / CHECKSUMS, LARGEST_LIST))
    except RecursionError as error:
        raise ValueError(f"{CHECKSUMS} is nested too deeply") from error
    if not isinstance(sums, dict) or not sums:
        raise ValueError(f"{CHECKSUMS} is no list of checksums")
    for name, checksum in sums.items():
        path = entry / f"{name}.npy"
        if not path.is_file():
            raise ValueError(f"{path.name} is missing")
        if _checksum(path) != checksum:
            raise ValueError(f"{path.name} doesn't match its checksum")
    return {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in sums}


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"data.cache_dir={root}: cannot be written ({error.strerror}). Give another folder, on a disk with space "
            "for four bytes a token."
        ) from error


def _write(root: Path, entry: Path, arrays: Arrays) -> None:
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=root))
    try:
        for name, array in arrays.items():
            np.save(unfinished / f"{name}.npy", array)
        sums = {name: _checksum(unfinished / f"{name}.npy") for name in arrays}
        (unfinished / CHECKSUMS).write_text(json.dumps(sums))
        open_to_others(unfinished)
        _put(unfinished, entry)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put(unfinished: Path, entry: Path) -> None:
    """Renames a complete entry to its final name, where it replaces a damaged one."""
    try:
        unfinished.rename(entry)
    except OSError:
        try:
            _read(entry)
        except (OSError, ValueError):
            shutil.rmtree(entry)
            unfinished.rename(entry)
        # Otherwise another run was faster. Its entry has the same content.
