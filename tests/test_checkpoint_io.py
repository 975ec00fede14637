"""Checkpoints are written completely, and damage is detected."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lit_ort
from lit_ort import AtomicCheckpointIO, LitOrtWarning
from lit_ort.checkpoint_io import verify
from lit_ort.errors import CheckpointError
from tests.scripts import run_code

STATE = {"state_dict": {"weight": torch.arange(1000.0)}, "epoch": 3, "text": "x" * 200}


def saved(path: Path) -> Path:
    AtomicCheckpointIO().save_checkpoint(STATE, path)
    return path


def same(checkpoint: dict[str, Any]) -> bool:
    return checkpoint["epoch"] == 3 and torch.equal(checkpoint["state_dict"]["weight"], STATE["state_dict"]["weight"])


def test_checkpoints_are_compatible_with_lightnings(tmp_path: Path) -> None:
    path = saved(tmp_path / "new" / "a.ckpt")
    assert same(TorchCheckpointIO().load_checkpoint(path, weights_only=True))
    TorchCheckpointIO().save_checkpoint(STATE, path)
    assert same(AtomicCheckpointIO().load_checkpoint(path, weights_only=True))
    assert [entry.name for entry in path.parent.iterdir()] == ["a.ckpt"]


def test_every_flipped_bit_is_detected_or_harmless(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt")
    original = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    detected = 0
    for bit in torch.randint(8 * len(original), (120,), generator=generator).tolist():
        data = bytearray(original)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            assert same(AtomicCheckpointIO().load_checkpoint(path, weights_only=True)), bit
        except CheckpointError as error:
            detected += 1
            message = str(error)
            assert str(path) in message
    assert detected > 60


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_detected(tmp_path: Path, share: float) -> None:
    path = saved(tmp_path / "a.ckpt")
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError, match=r"damaged or truncated|is not a checkpoint"):
        AtomicCheckpointIO().load_checkpoint(path)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_text("a poem")
    with pytest.raises(CheckpointError, match="a.ckpt, 6 bytes, is not a checkpoint"):
        AtomicCheckpointIO().load_checkpoint(path)
    with pytest.raises(CheckpointError, match="is not a file"):
        AtomicCheckpointIO().load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "absent.ckpt")


def test_older_formats_have_no_checksum_and_load(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    assert not verify(path)
    with pytest.warns(LitOrtWarning, match="a.ckpt has no checksums"):
        assert same(AtomicCheckpointIO().load_checkpoint(path, weights_only=True))
    saved(path)
    assert verify(path)


def test_files_without_checksums_load(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.warns(LitOrtWarning, match="a.ckpt has no checksums"):
        assert same(AtomicCheckpointIO().load_checkpoint(path, weights_only=True))


def test_a_plugin_keeps_what_it_writes_through(tmp_path: Path) -> None:
    class Outer(TorchCheckpointIO):
        def __init__(self) -> None:
            self.checkpoint_io = TorchCheckpointIO()

    own = Outer()
    inner = own.checkpoint_io
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, strategy="ort", plugins=own)
    assert trainer.strategy.checkpoint_io is own
    assert own.checkpoint_io is inner


def test_the_previous_checkpoint_stays_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a.ckpt")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    message = r"can't be written: No space left on device\. The previous checkpoint is unchanged"
    with pytest.raises(CheckpointError, match=message):
        AtomicCheckpointIO().save_checkpoint({**STATE, "epoch": 4}, path)
    monkeypatch.undo()
    assert same(AtomicCheckpointIO().load_checkpoint(path, weights_only=True))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def test_it_is_the_default_plugin_of_the_strategies(tmp_path: Path) -> None:
    def checkpoint_io(**options: Any) -> Any:
        return Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, **options).strategy.checkpoint_io

    assert type(checkpoint_io(strategy=lit_ort.ORTStrategy())) is AtomicCheckpointIO
    own = TorchCheckpointIO()
    assert checkpoint_io(strategy=lit_ort.ORTStrategy(), plugins=own) is own
    assert checkpoint_io(strategy=lit_ort.ORTStrategy(checkpoint_io=own)) is own
    wrapping = checkpoint_io(strategy="ort", plugins=AsyncCheckpointIO())
    assert type(wrapping) is AsyncCheckpointIO
    assert type(wrapping.checkpoint_io) is AtomicCheckpointIO


def test_a_module_loads_from_its_file(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", strategy="ort", logger=False, max_steps=2, default_root_dir=tmp_path, limit_val_batches=0,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = BoringModel()
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = BoringModel.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(again.layer.weight, module.layer.weight)


LIMITED = """
import resource, sys, torch
from pathlib import Path
from lit_ort import AtomicCheckpointIO
from lit_ort.errors import CheckpointError
path, checkpoint = Path(sys.argv[1]), {"weight": torch.arange(300.0), "more": [torch.ones(k) for k in range(4)]}
AtomicCheckpointIO().save_checkpoint(checkpoint, path)
previous = path.read_bytes()
for limit in range(1, len(previous), 31):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        AtomicCheckpointIO().save_checkpoint(checkpoint, path)
    except CheckpointError as error:
        assert "can't be written: File too large. The previous checkpoint is unchanged" in str(error)
    else:
        raise AssertionError(limit)
    assert path.read_bytes() == previous
    assert len(list(path.parent.iterdir())) == 1
"""


@pytest.mark.slow
def test_a_write_can_fail_at_any_position(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a.ckpt")]
    process = run_code(command)
    assert (process.returncode, process.stderr) == (0, "")
