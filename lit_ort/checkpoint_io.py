"""Checkpoints in Lightning's format that are written completely or not at all, and verified when they are read."""

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

# The name of torch's archive reader, which is in its errors.
_READER = "PytorchStreamReader"
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
# The exceptions of `zipfile` for damaged archives.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)


# The mixin precedes a TorchCheckpointIO of either Lightning package.
_Base: Any = object


class AtomicCheckpoints(_Base):
    """The implementation of `AtomicCheckpointIO` for both Lightning packages, each of which reads in its own way."""

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
            previous = "The previous checkpoint is unchanged" if local.exists() else "There is no previous checkpoint"
            raise CheckpointError(
                f"{path} can't be written: {error.strerror or error}. {previous}. Free disk space, or save to another "
                "folder."
            ) from error

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = lambda storage, loc: storage, *args: Any, **kw: Any
    ) -> dict[str, Any]:
        local = _local(path)
        if local is not None and local.exists() and not verify(local):
            warnings.warn(
                f"{local} has no checksums, so damage can't be detected. Save it again to add checksums.",
                LitOrtWarning,
                stacklevel=2,
            )
        try:
            return super().load_checkpoint(path, map_location, *args, **kw)
        except RuntimeError as error:
            if _READER not in str(error):
                raise
            raise CheckpointError(f"{path} is damaged: {first_line_of(error)} {_REMEDY}") from error


class AtomicCheckpointIO(AtomicCheckpoints, TorchCheckpointIO):
    """The checkpoint plugin of lit_ort's strategies; for other strategies use `Trainer(plugins=AtomicCheckpointIO())`.

    A local checkpoint is written to a temporary file in the same folder, without a copy in memory, and replaces the
    previous checkpoint when it is on disk. After a full disk or a killed process the previous one is still there.
    `torch.save` writes a checksum for each tensor, which `torch.load` ignores; it is verified here. Other file systems
    (`s3://...`) are handled by Lightning.

    Raises:
        CheckpointError: a file can't be written, is damaged or truncated, or is not a checkpoint.
        FileNotFoundError: there is no file.
    """


def _write(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # torch's writer continues after a failed write, and then fails because of the file's position.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def verify(path: Path) -> bool:
    """Compares a checkpoint's contents with their checksums.

    Returns:
        whether it has checksums; files of torch before 1.6 have none, nor have those with
        `torch.serialization.set_crc32_options(False)`.

    Raises:
        CheckpointError: it is damaged or truncated, or is not a checkpoint.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file, but a checkpoint is one. Pass the path of a saved checkpoint.")
    with path.open("rb") as file:
        head = file.read(len(_ZIP))
    if head[:1] == _PICKLE:
        return False
    if head != _ZIP:
        size = path.stat().st_size
        raise CheckpointError(f"{path}, {size} bytes, is not a checkpoint. Pass the path of a saved checkpoint.")
    try:
        with zipfile.ZipFile(path) as archive:
            if not any(entry.CRC for entry in archive.infolist()):
                return False
            damaged = archive.testzip()
    except _DAMAGED as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}. {_REMEDY}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} doesn't match its checksum. {_REMEDY}")
    return True


_REMEDY = "It changed after it was written, on disk or during a copy. Copy it again, or use another checkpoint."


def _local(path: Any) -> Path | None:
    """The local path of a path or URL; None for other file systems."""
    system, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(system, LocalFileSystem) else None
