"""Private interfaces of Lightning, alike in `lightning.pytorch` and `pytorch_lightning`.

The two packages have classes of the same names and no common base, so that Lightning's own objects are `Any` here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer


def is_compiled(module: Any) -> bool:
    """Whether a LightningModule comes from `torch.compile`: Lightning keeps what it needs to undo it in the module."""
    return module._compiler_ctx is not None


def synchronizes_layers(strategy: Any) -> bool:
    """Whether `Trainer(sync_batchnorm=True)` told a strategy to replace normalisation layers."""
    return strategy._layer_sync is not None


def trainer_of(module: Any) -> Any | None:
    """The Trainer that a LightningModule is attached to; the public property raises where there is none."""
    return module._trainer


def checks_logged_values_at_once(module: Any) -> bool:
    """Whether `log` may have to raise where it is called: no loop keeps results, or the step draws its own batches."""
    trainer = module._trainer
    if trainer is None or trainer._results is None:
        return True
    return type(trainer._active_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


def move_to(strategy: Any, device: torch.device) -> None:
    """Gives a strategy of one device another one, before it has a model."""
    strategy._root_device = device


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The user's optimizer behind Lightning's wrapper, which takes the wrapped one's class as a further base."""
    return optimizer._optimizer if hasattr(optimizer, "_on_before_step") else optimizer


def chosen_checkpoint_io(strategy: Any) -> Any | None:
    """What somebody chose to write a strategy's checkpoints; the public property gives Lightning's where nobody did."""
    return strategy._checkpoint_io


def leave_samplers_alone(trainer: Any) -> None:
    """As `Trainer(use_distributed_sampler=False)`, where a strategy finds out after the Trainer was made."""
    trainer._accelerator_connector.use_distributed_sampler = False


def replace_sigterm_handler(trainer: Any, handler: Callable[[int, Any], None]) -> None:
    """Sets what a Trainer does at SIGTERM; Lightning registers it after a strategy's `setup`."""
    trainer._signal_connector._sigterm_notifier_fn = handler


def note_sigterm(trainer: Any) -> bool:
    """Lets a Trainer end after the batch. Returns whether the signal is the first one."""
    connector = trainer._signal_connector
    first = not connector.received_sigterm
    connector.received_sigterm = True
    return first


def is_accumulating(trainer: Any) -> bool:
    """Whether the optimizer's step waits for more batches than the one that has just ended."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def validation_follows(trainer: Any) -> bool:
    """Whether a validation, or the end of the epoch, comes right after the training batch that has just ended."""
    loop = trainer.fit_loop.epoch_loop
    return loop.batch_progress.is_last_batch or loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def begin_validation_again(checkpoint: dict[str, Any]) -> None:
    """Makes a checkpoint that is written during a validation resume with that validation's first batch."""
    first = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    progress.update(total=dict(first), current=dict(first), is_last_batch=False)


def load_waiting_loader_states(trainer: Any) -> None:
    """Makes the loaders of a fit that resumes go on where its checkpoint says, where Lightning has not.

    It does so where it sets the loaders up. `trainer.estimated_stepping_batches`, which schedules of the learning rate
    ask for, sets them up before the checkpoint is read, and the run would begin its epoch's batches again.
    """
    loop = trainer.fit_loop
    states = loop._combined_loader_states_to_load
    if states and loop.restarting:
        loop._combined_loader._load_state_dicts(states)
        loop._combined_loader_states_to_load = []
        # The iterator that is there was made before.
        loop._data_fetcher.setup(loop._combined_loader)
        iter(loop._data_fetcher)


def training_bar(progress_bar: Any) -> Any | None:
    """The tqdm bar of a `TQDMProgressBar`'s training, None before the first one; the public property raises there."""
    return progress_bar._train_progress_bar


def describe_bar(progress_bar: Any, stage: str, text: str) -> Callable[[], None] | None:
    """Shows a text in front of a progress bar.

    Args:
        progress_bar: the Trainer's, tqdm's or Rich's.
        stage: `train`, `val`, `test` or `predict`.

    Returns:
        what puts back the text that was there; None where no bar is shown.
    """
    bar = getattr(progress_bar, f"_{stage}_progress_bar", None)
    if bar is not None and not bar.disable:
        before = bar.desc
        bar.set_description_str(text)
        return lambda: bar.set_description_str(before)
    rich = getattr(progress_bar, "progress", None)
    tasks = [getattr(progress_bar, f"{stage}{part}_progress_bar_id", None) for part in ("_sanity", "")]
    task = next((found for found in tasks if rich and found is not None and rich.tasks[found].visible), None)
    if rich is None or task is None:
        return None
    before = rich.tasks[task].description
    rich.update(task, description=text, refresh=True)
    return lambda: rich.update(task, description=before, refresh=True)


def beside_bars(progress_bar: Any) -> AbstractContextManager[Any]:
    """Clears the line of tqdm's bars for as long as something is written to the terminal."""
    bar = training_bar(progress_bar) if hasattr(progress_bar, "_train_progress_bar") else None
    return nullcontext() if bar is None else type(bar).external_write_mode()
