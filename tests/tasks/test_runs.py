"""Folders of runs: their use by a single run, and their checkpoints."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lit_ort_tasks import runs
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.runs import checkpoint_to_resume, require_unused, require_writable, resume_command
from omegaconf import OmegaConf

CONFIG = {"task": {"_target_": "lit_ort_tasks.gpt2.GPT2"}}


def run(folder: Path, task: str = "lit_ort_tasks.gpt2.GPT2", age: float = 0) -> Path:
    """Writes the files of a run. Returns its checkpoint."""
    last = folder / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    os.utime(last, (1e9 - age, 1e9 - age))
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(f"task:\n  _target_: {task}\n")
    return last


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    require_unused(tmp_path / "new", None)
    last = run(tmp_path / "old")
    with pytest.raises(
        InputError, match=r"checkpoints/last.ckpt of another run.*ckpt_path=.*old/checkpoints/last.ckpt"
    ):
        require_unused(tmp_path / "old", None)
    run(tmp_path / "old (1)")
    with pytest.raises(InputError, match=r"ckpt_path='.*/old \(1\)/checkpoints/last.ckpt'") as caught:
        require_unused(tmp_path / "old (1)", None)
    assert shlex.split(str(caught.value).split("resume that run: ")[1].rstrip("."))[0].endswith("last.ckpt'")
    with pytest.raises(InputError, match="would be overwritten"):
        require_unused(tmp_path / "old", str(run(tmp_path / "other")))
    require_unused(tmp_path / "old", str(last))
    require_unused(tmp_path / "old", "last")
    # The newest one of another folder would continue over its files.
    finished = run(tmp_path / "finished")
    finished.rename(finished.with_name("best.ckpt"))
    with pytest.raises(InputError, match="would be overwritten"):
        require_unused(tmp_path / "finished", "last")
    # The file of a run that was killed while it wrote its first checkpoint.
    unfinished = tmp_path / "young" / "checkpoints" / f".last.ckpt.{'0' * 32}.tmp"
    unfinished.parent.mkdir(parents=True)
    unfinished.touch()
    require_unused(tmp_path / "young", None)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run folder .*/file/run: can't be written to: Not a directory. Choose"):
        require_writable(tmp_path / "file" / "run")

    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(runs.tempfile, "TemporaryFile", read_only)
    with pytest.raises(InputError, match="can't be written to: Read-only file system"):
        require_writable(tmp_path / "new")


def test_the_newest_checkpoint_of_the_task_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = r"ckpt_path=last: .*/runs has no checkpoint of a run of lit_ort_tasks.gpt2.GPT2"
    with pytest.raises(InputError, match=message):
        checkpoint_to_resume("last", tmp_path / "new", CONFIG)
    run(runs.RUNS / "monday" / "1", age=10)
    newest = run(runs.RUNS / "monday" / "2", age=5)
    run(runs.RUNS / "tuesday" / "3", "lit_ort_tasks.other.Task")
    assert checkpoint_to_resume("last", tmp_path / "new", CONFIG) == str(newest)
    own = run(tmp_path / "new", age=50)
    assert checkpoint_to_resume("last", tmp_path / "new", CONFIG) == str(own)


def test_paths_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    last = run(tmp_path / "old")
    assert checkpoint_to_resume("~/old/checkpoints/last.ckpt", tmp_path, CONFIG) == str(last)
    assert checkpoint_to_resume(None, tmp_path, CONFIG) is None
    with pytest.raises(InputError, match="no such file"):
        checkpoint_to_resume("absent.ckpt", tmp_path, CONFIG)
    with pytest.raises(InputError, match="is no file"):
        checkpoint_to_resume(str(tmp_path), tmp_path, CONFIG)


def test_the_command_that_resumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", [str(tmp_path / "train.py"), "task=gpt2", "data.train_file=a b.txt", "ckpt_path=old"]
    )
    assert (
        resume_command(Path("last.ckpt")) == "python train.py task=gpt2 'data.train_file=a b.txt' ckpt_path=last.ckpt"
    )
    assert shlex.split(resume_command(Path("a=1/é.ckpt")))[-1] == "ckpt_path='a=1/é.ckpt'"


def test_a_run_of_a_multirun_resumes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["strategy=ort", "hparams_search=optuna", "optimizer.lr=0.1", "ckpt_path=old"]
    settings = OmegaConf.create({"mode": RunMode.MULTIRUN, "overrides": {"task": words}})
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    monkeypatch.setattr(HydraConfig, "get", lambda: settings)
    monkeypatch.setattr("sys.argv", ["lit-ort", "-m", "strategy=eager,ort", "hydra.sweep.dir=a"])
    assert resume_command(Path("last.ckpt")) == "lit-ort train strategy=ort optimizer.lr=0.1 ckpt_path=last.ckpt"
