"""Tokenised data on disk, found by what it was made from, read without loading it.

An entry is a folder of .npy files. It is written beside its place and moved there when it is whole, so a run that was
stopped leaves nothing that a later one could take for an entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tasks.errors import InputError

Arrays = Mapping[str, np.ndarray]


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/lit_ort/tokens`, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_ort" / "tokens"


def content_key(texts: Iterable[str], **settings: Any) -> str:
    """A name for what is made from these texts with these settings (JSON values): equal for equal ones alone."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def cached_arrays(folder: str | os.PathLike[str] | None, key: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of an entry, memory-mapped and read-only; `make` is called where there is none yet.

    folder: where entries are kept; None is `default_folder()`.

    Raises InputError if the folder can't be written.
    """
    root = default_folder() if folder is None else Path(folder)
    entry = root / key
    if not entry.is_dir():
        _write(root, entry, make())
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(entry.glob("*.npy"))}


def _write(root: Path, entry: Path, arrays: Arrays) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=root))
    except OSError as error:
        raise InputError(
            f"data.cache_dir={root}: cannot be written ({error.strerror}). Give a folder that can, on a disk with room "
            "for four bytes a token."
        ) from error
    try:
        for name, array in arrays.items():
            np.save(unfinished / f"{name}.npy", array)
        try:
            unfinished.rename(entry)
        except OSError:
            # Another run was faster; its entry was made from the same content.
            if not entry.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
