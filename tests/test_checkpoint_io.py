"""Checkpoints that are whole, and told from damaged ones."""

from __future__ import annotations

import errno
import os
import subprocess
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

STATE = {"state_dict": {"weight": torch.arange(1000.0)}, "epoch": 3, "text": "x" * 200}


def saved(path: Path) -> Path:
    AtomicCheckpointIO().save_checkpoint(STATE, path)
    return path


def same(found: dict[str, Any]) -> bool:
    return found["epoch"] == 3 and torch.equal(found["state_dict"]["weight"], STATE["state_dict"]["weight"])


def test_lightning_reads_it_and_it_reads_lightnings(tmp_path: Path) -> None:
    path = saved(tmp_path / "new" / "a.ckpt")
    assert same(TorchCheckpointIO().load_checkpoint(path, weights_only=True))
    TorchCheckpointIO().save_checkpoint(STATE, path)
    assert same(AtomicCheckpointIO().load_checkpoint(path, weights_only=True))
    assert [found.name for found in path.parent.iterdir()] == ["a.ckpt"]


def test_every_flipped_bit_is_found_or_harmless(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt")
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    found = 0
    for place in torch.randint(8 * len(whole), (120,), generator=generator).tolist():
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            assert same(AtomicCheckpointIO().load_checkpoint(path, weights_only=True)), place
        except CheckpointError as error:
            found += 1
            said = str(error)
            assert str(path) in said
    assert found > 60


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_off_file_is_told(tmp_path: Path, share: float) -> None:
    path = saved(tmp_path / "a.ckpt")
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError, match=r"damaged or cut off|is no checkpoint"):
        AtomicCheckpointIO().load_checkpoint(path)


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_text("a poem")
    with pytest.raises(CheckpointError, match="a.ckpt, 6 bytes, is no checkpoint"):
        AtomicCheckpointIO().load_checkpoint(path)
    with pytest.raises(CheckpointError, match="is no file"):
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


def test_a_full_disk_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a.ckpt")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"can't be written: No space left on device. The checkpoint that was"):
        AtomicCheckpointIO().save_checkpoint({**STATE, "epoch": 4}, path)
    monkeypatch.undo()
    assert same(AtomicCheckpointIO().load_checkpoint(path, weights_only=True))
    assert [found.name for found in tmp_path.iterdir()] == ["a.ckpt"]


def test_strategies_write_with_it_unless_told_otherwise(tmp_path: Path) -> None:
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
before = path.read_bytes()
for limit in range(1, len(before), 31):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        AtomicCheckpointIO().save_checkpoint(checkpoint, path)
    except CheckpointError as error:
        assert "can't be written: File too large. The checkpoint that was there is as it was" in str(error)
    else:
        raise AssertionError(limit)
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 1
"""


@pytest.mark.slow
def test_a_write_may_fail_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a.ckpt")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
