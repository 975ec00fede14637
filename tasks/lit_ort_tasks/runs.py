"""Folders of runs: their use by a single run, their checkpoints, and the command line that resumes."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lit_ort_tasks.commands.program import command_line
from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.overrides import override_of

RUNS = Path("runs")
LAST = "last"
_LAST_FILE = Path("checkpoints") / "last.ckpt"
RESULTS = "results.json"
_RUN_FILES = ("checkpoints/*.ckpt", RESULTS, "report.md")
_OPTIONS = "hydra.run.dir, of a multirun hydra.sweep.dir"
_CONFIG = Path(".hydra") / "config.yaml"


# For the names of folders in conf/.
OmegaConf.register_new_resolver("process", os.getpid, replace=True)
# For the help in conf/.
OmegaConf.register_new_resolver("command", command_line, replace=True)


class RunFolder(Callback):
    """Refuses a folder with the results of another run, or without write permission, before Hydra writes to it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check(config, config.hydra.run.dir)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if str(config.hydra.mode).endswith("MULTIRUN"):
            self._check(config, str(Path(config.hydra.sweep.dir) / config.hydra.sweep.subdir))

    def _check(self, config: DictConfig, folder: str) -> None:
        # Processes that Lightning starts use the folder of the first one.
        if getattr(rank_zero_only, "rank", 0):
            return
        path = Path(folder).expanduser()
        try:
            require_unused(path, config.get("ckpt_path"))
            require_writable(path)
        except InputError as error:
            # Hydra turns the exceptions of a callback into warnings.
            sys.exit(f"error: {error}")


def require_unused(folder: Path, ckpt_path: str | None) -> None:
    """Refuses a folder with the files of a run, unless that run resumes.

    Raises:
        InputError: there are checkpoints or results in it.
    """
    file = next((path for pattern in _RUN_FILES for path in sorted(folder.glob(pattern))), None)
    if file is None:
        return
    resumes = ckpt_path is not None and (
        (ckpt_path == LAST and (folder / _LAST_FILE).is_file())
        or folder.resolve() in Path(ckpt_path).expanduser().resolve().parents
    )
    resuming = shlex.quote(override_of("ckpt_path", folder / _LAST_FILE))
    require(
        resumes,
        f"run folder {folder}: has {file.relative_to(folder)} of another run, which would be overwritten. Choose "
        f"another folder ({_OPTIONS}), or resume that run: {resuming}.",
    )


def require_writable(folder: Path) -> None:
    """Creates a folder, and for a moment a file in it.

    Raises:
        InputError: one of the two isn't possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"run folder {folder}: can't be written to: {error.strerror or error}. Choose another one ({_OPTIONS})."
        ) from error


@rank_zero_only
def discard_refused(folder: Path) -> None:
    """Deletes the folder of a run that was refused before it began: what Hydra wrote, and folders empty without it.

    Folders outside of `runs/`, and those with a log that is not empty or any other file, stay as they are.
    """
    runs, folder = RUNS.resolve(), folder.resolve()
    files = [path for path in folder.rglob("*") if path.is_file()]
    kept = [path for path in files if path.parent.name != ".hydra" and (path.suffix != ".log" or path.stat().st_size)]
    if kept or runs not in folder.parents:
        return
    for path in files:
        path.unlink()
    for path in (folder / ".hydra", folder, *folder.parents):
        if path == runs.parent or (path.is_dir() and any(path.iterdir())):
            break
        if path.is_dir():
            path.rmdir()


def checkpoint_to_resume(ckpt_path: str | None, folder: Path, config: Mapping[str, Any]) -> str | None:
    """The checkpoint of `ckpt_path`; `last` is the newest one of the same task, in this folder or else in runs/.

    Raises:
        InputError: there is none.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == LAST:
        return str(_newest(folder, config))
    path = Path(ckpt_path).expanduser()
    require(
        path.is_file(),
        f"ckpt_path={ckpt_path}: {'is no file' if path.exists() else 'no such file'}. Give a checkpoint of an earlier "
        "run, or leave it out.",
    )
    return str(path)


def _newest(folder: Path, config: Mapping[str, Any]) -> Path:
    own = folder / _LAST_FILE
    if own.is_file():
        return own
    task = config["task"]["_target_"]
    checkpoints = [path for path in RUNS.rglob(str(_LAST_FILE)) if _task_of(path.parents[1]) == task]
    if not checkpoints:
        raise InputError(
            f"ckpt_path={LAST}: {RUNS.resolve()} has no checkpoint of a run of {task}. Give a checkpoint's path, or "
            "leave it out."
        )
    return max(checkpoints, key=lambda path: path.stat().st_mtime)


def _task_of(folder: Path) -> str | None:
    if not (folder / _CONFIG).is_file():
        return None
    return OmegaConf.select(OmegaConf.load(folder / _CONFIG), "task._target_")


def resume_command(checkpoint: Path) -> str:
    """The command line of this run, with a checkpoint from which it resumes."""
    arguments = [value for value in _own_arguments() if not value.lstrip("+").startswith("ckpt_path=")]
    return f"{command_line('train')} {shlex.join([*arguments, override_of('ckpt_path', checkpoint)])}"


def _own_arguments() -> list[str]:
    """The arguments of this process, or in a multirun those of its current run, without the search that chose them."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return sys.argv[1:]
    overrides = [str(value) for value in HydraConfig.get().overrides.task]
    return [value for value in overrides if not value.lstrip("+").startswith("hparams_search=")]
