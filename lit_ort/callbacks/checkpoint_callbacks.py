"""Checkpoints: the last one, to resume a run, and the best one."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor

from lit_ort._compat.lightning import (
    begin_validation_again,
    is_accumulating,
    load_waiting_loader_states,
    note_sigterm,
    own_class_of,
    replace_sigterm_handler,
    stops_early,
    validation_follows,
)
from lit_ort._compat.plain_checkpoints import plain_values
from lit_ort.errors import OptionsError
from lit_ort.files import remove_unfinished

STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# The exit code of a process that a signal ends, in shells, is this plus the signal's number.
_ENDED_BY_SIGNAL = 128


class LastCheckpoint(Checkpoint):
    """One checkpoint file to resume from, written after each epoch, at intervals within it, and when a run is stopped.

    SIGTERM and Ctrl-C end a run after the batch, with a checkpoint and with the exit code that shells expect (143 and
    130). A second Ctrl-C ends it immediately.

    Args:
        dirpath: the checkpoint's folder.
        filename: the file's name without the suffix `.ckpt`.
        train_time_interval: seconds between checkpoints within an epoch; None writes none by time.
        every_n_train_steps: optimizer steps between checkpoints within an epoch; None writes none by steps.
        save_on_train_epoch_end: write a checkpoint at the end of each epoch.
        resume: returns, for the checkpoint's path, the command or call that resumes from it, for the message.

    Raises:
        OptionsError: a folder on another file system, an interval that is not above 0 seconds, or fewer than one step.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        filename: str = "last",
        train_time_interval: float | None = 600.0,
        every_n_train_steps: int | None = None,
        save_on_train_epoch_end: bool = True,
        resume: Callable[[Path], str] = lambda path: f"Trainer.fit(..., ckpt_path={str(path)!r})",
    ) -> None:
        if train_time_interval is not None and not train_time_interval > 0:
            raise OptionsError(
                f"train_time_interval={train_time_interval}: must be above 0 seconds. Pass such a number, or None to "
                "write no checkpoints by time."
            )
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise OptionsError(f"every_n_train_steps={every_n_train_steps}: must be at least 1, or None.")
        if "://" in str(dirpath):
            raise OptionsError(
                f"dirpath={str(dirpath)!r}: must be a local folder, where files can be replaced at once. Pass one, "
                "or write to another file system with Lightning's ModelCheckpoint."
            )
        self.path = Path(dirpath).expanduser().absolute() / f"{filename}.ckpt"
        self.train_time_interval = train_time_interval
        self.every_n_train_steps = every_n_train_steps
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.resume = resume
        self._saved_at_s, self._saved_step = 0.0, 0
        self._is_due = False
        self._signum: int | None = None
        self._handlers: dict[int, Any] = {}
        # The Trainer of the current run, and the process that it runs in.
        self._trainer: Trainer | None = None
        self._process = 0
        self._others: list[Checkpoint] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "predict":
            return
        self._trainer, self._signum, self._process, self._is_due = trainer, None, os.getpid(), False
        self._others = [callback for callback in trainer.checkpoint_callbacks if callback is not self]
        if trainer.is_global_zero:
            remove_unfinished(self.path.parent)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != self._note:
                    self._handlers[number] = signal.signal(number, self._note)

    @property
    def best_model_path(self) -> str:
        """That of the Trainer's other checkpoint callbacks: Lightning asks the first of all for `ckpt_path="best"`."""
        paths = (getattr(callback, "best_model_path", "") for callback in self._others)
        return next((path for path in paths if path), "")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's own handler could end the run between the batches of one optimizer step.
        replace_sigterm_handler(trainer, partial(_pass_on, trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        load_waiting_loader_states(trainer)
        self._saved_at_s, self._saved_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._is_due = self._is_due or self._is_due_at(trainer)
        # Accumulated gradients are not part of a checkpoint.
        if is_accumulating(trainer):
            return
        # If a checkpoint is due in one process, or one has received a signal, all processes save or stop at this step.
        self._is_due, is_stopping = _any_of(trainer, self._is_due, self._signum is not None)
        # Before a validation or the end of an epoch, the checkpoint is written after it: a run that resumed from an
        # earlier one would skip it.
        if self._is_due and not validation_follows(trainer):
            self._save(trainer)
        if is_stopping:
            note_sigterm(trainer)

    def _is_due_at(self, trainer: Trainer) -> bool:
        interval, steps = self.train_time_interval, self.every_n_train_steps
        if interval is not None and time.monotonic() - self._saved_at_s >= interval:
            return True
        if steps is not None and trainer.global_step // steps > self._saved_step // steps:
            return True
        # If a limit ends the run within an epoch, Lightning treats the epoch as complete afterwards.
        return stops_early(trainer) or trainer.global_step == trainer.max_steps

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # Several processes can have different numbers of validation batches; they stop at the next training step. A run
        # doesn't stop between the batches of an optimizer step either, whose gradients are not part of a checkpoint.
        is_between = trainer.state.fn == "fit" and is_accumulating(trainer)
        if self._signum is not None and trainer.world_size == 1 and not is_between:
            note_sigterm(trainer)

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or is_accumulating(trainer):
            return
        # Callbacks for early stopping have already run.
        if _any_of(trainer, self._is_due or (trainer.state.fn == "fit" and stops_early(trainer)))[0]:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return
        # One that was due after the last batch and no validation has written.
        if self.save_on_train_epoch_end or (not is_accumulating(trainer) and _any_of(trainer, self._is_due)[0]):
            self._save(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.validating:
            # The metrics of a validation in progress are not part of a checkpoint.
            begin_validation_again(checkpoint)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._trainer = None
        # Each of Lightning's packages has a class of its own.
        if own_class_of(exception).__name__ != "SIGTERMException" or not isinstance(exception, SystemExit):
            return
        signum = signal.SIGTERM if self._signum is None else self._signum
        exception.code = _ENDED_BY_SIGNAL + signum
        message = f"stopped by {signal.Signals(signum).name} at step {trainer.global_step}"
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not _is_trial(trainer):
            self._save(trainer)
            message += f" of epoch {trainer.current_epoch}; saved {self.path}. Resume: {self.resume(self.path)}"
        if trainer.is_global_zero:
            print(f"\n{message}", file=sys.stderr, flush=True)

    def _save(self, trainer: Trainer) -> None:
        if _is_trial(trainer):
            return
        trainer.save_checkpoint(self.path, weights_only=False)
        self._is_due, self._saved_at_s, self._saved_step = False, time.monotonic(), trainer.global_step

    def _note(self, signum: int, frame: Any) -> None:
        """Handles a signal: records it, so that the run stops when the batch is done."""
        if os.getpid() != self._process and signum == signal.SIGINT:
            return  # a dataloader's worker, whose batch is still needed
        if self._trainer is None or os.getpid() != self._process:
            self._forward(signum, frame)
        elif self._signum == signal.SIGINT == signum:
            raise KeyboardInterrupt
        else:
            self._signum = signum
            if signum == signal.SIGINT:
                # Unbuffered, as Python's buffer can be in the middle of another line.
                os.write(STDERR, b"\nstopping after this batch; Ctrl-C again stops at once\n")

    def _forward(self, signum: int, frame: Any) -> None:
        """Calls the handler from before this one; between runs Lightning restores all handlers, this one included."""
        previous = self._handlers.get(signum, signal.SIG_DFL)
        if callable(previous):
            previous(signum, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handlers": {}, "_trainer": None, "_others": []}


def _is_trial(trainer: Trainer) -> bool:
    """Whether a run only tries the code; Lightning writes no checkpoints of such a run either."""
    return bool(trainer.fast_dev_run)  # pyright: ignore[reportAttributeAccessIssue] - not declared


def _any_of(trainer: Trainer, *flags: bool) -> list[bool]:
    """Return for each flag whether it is set in any process, by one collective for all flags."""
    if trainer.world_size == 1:
        return list(flags)
    own = torch.tensor(flags, dtype=torch.int32, device=trainer.strategy.root_device)
    return [bool(flag) for flag in trainer.strategy.reduce(own, reduce_op="max")]


def _pass_on(trainer: Trainer, signum: int, _: Any) -> None:
    """Sends a signal to the processes that this one started."""
    if trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signum)  # pyright: ignore[reportAttributeAccessIssue] - launchers of processes


def values_in(trainer: Trainer, path: Path) -> dict[str, Any]:
    """The tensors and plain values of a checkpoint, whatever objects are among its hyperparameters."""
    try:
        return trainer.strategy.checkpoint_io.load_checkpoint(path, weights_only=True)
    except (pickle.UnpicklingError, TypeError):
        # Plugins for pytorch_lightning before 2.6 have no such argument.
        return plain_values(path)


class BestCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint` with one file, which a later run in the folder replaces only by a better one."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with warnings.catch_warnings():
            # Lightning warns about files that a run could replace.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        path = Path(self.dirpath or "") / f"{self.filename}{self.FILE_EXTENSION}"
        if not path.is_file():
            return
        saved = values_in(trainer, path)
        score = saved.get("callbacks", {}).get(self.state_key, {}).get("current_score")
        if isinstance(score, Tensor) and self._is_better(score):
            self.best_k_models = {str(path): score}
            self.best_model_path = self.kth_best_model_path = str(path)
            self.best_model_score = self.kth_value = score

    def _is_better(self, score: Tensor) -> bool:
        best = self.best_model_score
        if best is None:
            return True
        return bool(score <= best if self.mode == "min" else score >= best)
