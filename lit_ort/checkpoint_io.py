"""Checkpoints in Lightning's format, written whole or not at all and verified when they are read."""

from __future__ import annotations

import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO

from lit_ort.errors import CheckpointError, LitOrtWarning, first_line_of
from lit_ort.files import remove_unfinished, whole_file

# torch's reader of archives, in its errors.
_READER = "PytorchStreamReader"
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
# What `zipfile` raises for archives whose structure is damaged.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)


class AtomicCheckpointIO(TorchCheckpointIO):
    """The default of this package's strategies; `Trainer(plugins=AtomicCheckpointIO())` for others.

    A local checkpoint is written beside its place, without a copy in memory, put on disk and then moved there, so that
    a full disk or a killed process leaves the one before. `torch.save` writes a checksum for each tensor, which
    `torch.load` ignores: it is verified here. Other file systems (`s3://...`) are served as Lightning does.

    Raises:
        CheckpointError: a file that can't be written, or is damaged, cut off or no checkpoint.
        FileNotFoundError: there is none.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        local = _local(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            remove_unfinished(local.parent)
            with whole_file(local) as file:
                _write(checkpoint, file)
        except OSError as error:
            before = "The checkpoint that was there is as it was" if local.exists() else "There was none before"
            raise CheckpointError(
                f"{path} can't be written: {error.strerror or error}. {before}. Make room, or save to another folder."
            ) from error

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = lambda storage, loc: storage, *args: Any, **kw: Any
    ) -> dict[str, Any]:
        local = _local(path)
        if local is not None and local.exists() and not verify(local):
            warnings.warn(
                f"{local} has no checksums, as files of torch before 1.6 have none, so damage to it can't be told. "
                "Saved again, it has.",
                LitOrtWarning,
                stacklevel=2,
            )
        try:
            return super().load_checkpoint(path, map_location, *args, **kw)
        except RuntimeError as error:
            if _READER not in str(error):
                raise
            raise CheckpointError(f"{path} is damaged: {first_line_of(error)} {_REMEDY}") from error


def _write(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # torch's writer goes on to its end behind a write that failed, and finds itself at another place.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def verify(path: Path) -> bool:
    """Compares a checkpoint's contents with their checksums.

    Returns:
        whether it has any: a file of torch before 1.6 has none.

    Raises:
        CheckpointError: it is damaged, cut off, or no checkpoint.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is no file, and checkpoints are. Give the path of one that a run saved.")
    with path.open("rb") as file:
        head = file.read(len(_ZIP))
    if head[:1] == _PICKLE:
        return False
    if head != _ZIP:
        size = path.stat().st_size
        raise CheckpointError(f"{path}, {size} bytes, is no checkpoint. Give the path of one that a run saved.")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except _DAMAGED as error:
        raise CheckpointError(f"{path} is damaged or cut off: {error}. {_REMEDY}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} doesn't match its checksum. {_REMEDY}")
    return True


_REMEDY = "It changed after it was written, on the disk or on its way: copy it again, or take another checkpoint."


def _local(path: Any) -> Path | None:
    """The place of a path or URL on this machine's own file systems; None for others."""
    system, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(system, LocalFileSystem) else None
