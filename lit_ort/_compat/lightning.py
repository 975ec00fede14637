"""Private interfaces of Lightning, for both `lightning.pytorch` and `pytorch_lightning`.

The classes of the two packages have the same names but no common base, so Lightning's objects are typed as `Any`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from lit_ort._compat.patching import replaced_entry

LIGHTNING = "lightning.pytorch"
PYTORCH_LIGHTNING = "pytorch_lightning"


def package_of(value: Any) -> str:
    """The package of an object of Lightning's, `lightning.pytorch` or `pytorch_lightning`.

    Its class can also be derived from one of Lightning's, as libraries derive their Trainers.
    """
    return PYTORCH_LIGHTNING if _is_in(own_class_of(value), PYTORCH_LIGHTNING) else LIGHTNING


def is_from_lightning(value: Any) -> bool:
    """Whether a class or a function is Lightning's."""
    return any(_is_in(value, package) for package in ("lightning", PYTORCH_LIGHTNING))


def own_class_of(value: Any) -> type:
    """The class of Lightning's that an object's class is, or is derived from; the object's class if there is none."""
    return next((kind for kind in type(value).__mro__ if is_from_lightning(kind)), type(value))


def _is_in(value: Any, package: str) -> bool:
    return value.__module__.partition(".")[0] == package


def derive_from_pytorch_lightning(*callbacks: type) -> None:
    """Gives classes that derive from `lightning.pytorch` the same bases of `pytorch_lightning` behind them.

    Its Trainer looks for its own classes: before 2.6 it rejects every other callback, and each version adds its own
    progress bar and checkpoint to those that it doesn't know.
    """
    for callback in callbacks:
        bases = callback.__bases__
        others = (in_package(base, PYTORCH_LIGHTNING) for base in bases if is_from_lightning(base))
        callback.__bases__ = (*bases, *others)


def in_package(kind: type, package: str) -> Any:
    """The class of `lightning.pytorch` or `pytorch_lightning` that a class of `lightning.pytorch` corresponds to."""
    if package == LIGHTNING:
        return kind
    return getattr(importlib.import_module(kind.__module__.replace(LIGHTNING, package, 1)), kind.__name__)


def configure_launcher(kind: Any, strategy: Any) -> None:
    """Gives a strategy the launcher that one of Lightning's classes has."""
    kind._configure_launcher(strategy)


def is_compiled(module: Any) -> bool:
    """Whether a LightningModule was compiled by `torch.compile`. Lightning then stores in it how to undo that."""
    return module._compiler_ctx is not None


def uncompile(module: Any) -> None:
    """Gives a LightningModule that `torch.compile` compiled its own methods back."""
    importlib.import_module(f"{package_of(module)}.utilities.compile").to_uncompiled(module)


def synchronizes_layers(strategy: Any) -> bool:
    """Whether `Trainer(sync_batchnorm=True)` has set a strategy to replace batch normalization layers."""
    return strategy._layer_sync is not None


def trainer_of(module: Any) -> Any | None:
    """The Trainer that a LightningModule is attached to, or None, where the public property raises."""
    return module._trainer


def is_lightning_module(module: Any) -> bool:
    return own_class_of(module).__name__ == "LightningModule" and is_from_lightning(own_class_of(module))


def step_arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """The arguments that Lightning's loops pass to a step: the batch and, if the step takes one, an index."""
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_index = inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in positional for kind in kinds) >= 2
    return (batch, 0) if takes_index else (batch,)


def has_own_log(module: Any) -> bool:
    """Whether the class of a LightningModule has a `log` in place of Lightning's."""
    return is_lightning_module(module) and not is_from_lightning(type(module).log)


def base_with_log(module: Any) -> Any:
    """The class of a LightningModule that has Lightning's own `log`."""
    return next(cls for cls in type(module).__mro__ if "log" in vars(cls) and is_from_lightning(vars(cls)["log"]))


def trainer_of_steps(package: str, steps: int) -> Any:
    """A Trainer without data that answers for the length of a run: one epoch of so many batches.

    Args:
        package: `lightning.pytorch` or `pytorch_lightning`.
        steps: the number of batches and of optimizer steps.
    """
    kind = importlib.import_module(package).Trainer
    answers = {"num_training_batches": steps, "estimated_stepping_batches": steps}
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = dict.fromkeys(quiet, False) | {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "max_steps": steps}
    # Its lines are about devices.
    logger = logging.getLogger(package)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return type(kind.__name__, (kind,), answers)(**settings)
    finally:
        logger.setLevel(level)


def checks_logged_values_at_once(module: Any) -> bool:
    """Whether `log` can raise at the call: no loop collects results, or the step reads its batches from an iterator."""
    trainer = module._trainer
    if trainer is None or trainer._results is None:
        return True
    return own_class_of(trainer._active_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


def move_to(strategy: Any, device: torch.device) -> None:
    """Changes the device of a single-device strategy, before it has a model."""
    strategy._root_device = device


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The user's optimizer inside Lightning's wrapper. The wrapper is also a subclass of the optimizer's class."""
    return optimizer._optimizer if hasattr(optimizer, "_on_before_step") else optimizer


def chosen_checkpoint_io(strategy: Any) -> Any | None:
    """The `CheckpointIO` that the user set on a strategy, or None, where the public property returns the default."""
    return strategy._checkpoint_io


def is_checkpoint_wrapper(plugin: Any) -> bool:
    """Whether a `CheckpointIO` is one of Lightning's around another, which its strategies set."""
    return any(kind.__name__ == "_WrappingCheckpointIO" and is_from_lightning(kind) for kind in type(plugin).__mro__)


def generator_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators on the CPU."""
    from lightning.fabric.utilities.seed import _collect_rng_states

    return _collect_rng_states(include_cuda=False)


def set_generator_states(states: dict[str, Any]) -> None:
    from lightning.fabric.utilities.seed import _set_rng_states

    _set_rng_states(states)


def running_hook(module: Any) -> str | None:
    """The hook or step of a module that Lightning is calling, by which it names what is logged."""
    return getattr(module, "_current_fx_name", None)


@contextmanager
def in_hook(module: Any, hook: str | None) -> Iterator[None]:
    """Lets a module log as from one of its hooks."""
    if hook == running_hook(module):
        yield
        return
    with replaced_entry(vars(module), "_current_fx_name", hook):
        yield


def leave_samplers_alone(trainer: Any) -> None:
    """Sets `use_distributed_sampler=False` on a Trainer that already exists."""
    trainer._accelerator_connector.use_distributed_sampler = False


def replace_sigterm_handler(trainer: Any, handler: Callable[[int, Any], None]) -> None:
    """Replaces a Trainer's SIGTERM handler, which Lightning registers after a strategy's `setup`."""
    trainer._signal_connector._sigterm_notifier_fn = handler


def note_sigterm(trainer: Any) -> bool:
    """Makes a Trainer stop after the current batch. Returns whether this is the first SIGTERM."""
    connector = trainer._signal_connector
    first = not connector.received_sigterm
    connector.received_sigterm = True
    return first


def clears_gradients(trainer: Any) -> bool:
    """Whether Lightning clears gradients between the training step that runs now and its backward."""
    # StochasticWeightAveraging skips both in its epoch for statistics.
    is_first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
    return is_first and not trainer.fit_loop._skip_backward


def is_accumulating(trainer: Any) -> bool:
    """Whether gradients are still accumulated after the batch that has just ended, without an optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def stops_early(trainer: Any) -> bool:
    """Whether a callback or the user has ended the fit, and no minimum of epochs or steps prolongs it."""
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


def is_inside_epoch(trainer: Any) -> bool:
    """Whether training is between two batches of an epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return 0 < progress.current.ready < trainer.num_training_batches and not progress.is_last_batch


def validation_follows(trainer: Any) -> bool:
    """Whether validation, or the end of the epoch, follows the training batch that has just ended."""
    loop = trainer.fit_loop.epoch_loop
    return loop.batch_progress.is_last_batch or loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def begin_validation_again(checkpoint: dict[str, Any]) -> None:
    """Changes a checkpoint that is written during validation so that it resumes at the first validation batch."""
    first = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    progress.update(total=dict(first), current=dict(first), is_last_batch=False)


def load_waiting_loader_states(trainer: Any) -> None:
    """Loads the dataloader states of a checkpoint if Lightning has not done so.

    Lightning loads them when it sets up the dataloaders. `trainer.estimated_stepping_batches`, which learning rate
    schedules use, sets them up before the checkpoint is read. The resumed run would then begin its epoch again.
    """
    loop = trainer.fit_loop
    states = loop._combined_loader_states_to_load
    if states and loop.restarting:
        loop._combined_loader._load_state_dicts(states)
        loop._combined_loader_states_to_load = []
        # The existing iterator was created before the states were loaded.
        loop._data_fetcher.setup(loop._combined_loader)
        iter(loop._data_fetcher)


def training_bar(progress_bar: Any) -> Any | None:
    """The tqdm bar for training of a `TQDMProgressBar`, or None before the first one, where the property raises."""
    return progress_bar._train_progress_bar


def describe_bar(progress_bar: Any, stage: str, text: str) -> Callable[[], None] | None:
    """Shows a text as the description of a progress bar.

    Args:
        progress_bar: the Trainer's progress bar, by tqdm or Rich.
        stage: `train`, `val`, `test` or `predict`.
        text: the description.

    Returns:
        A function that restores the previous description; None if no bar is visible.
    """
    bar = getattr(progress_bar, f"_{stage}_progress_bar", None)
    if bar is not None and not bar.disable:
        previous = bar.desc
        bar.set_description_str(text)
        return lambda: bar.set_description_str(previous)
    rich = getattr(progress_bar, "progress", None)
    tasks = [getattr(progress_bar, f"{stage}{part}_progress_bar_id", None) for part in ("_sanity", "")]
    task = next((task for task in tasks if rich and task is not None and rich.tasks[task].visible), None)
    if rich is None or task is None:
        return None
    previous = rich.tasks[task].description
    rich.update(task, description=text, refresh=True)
    return lambda: rich.update(task, description=previous, refresh=True)


def beside_bars(progress_bar: Any) -> AbstractContextManager[Any]:
    """A context that clears tqdm's bars while other text is written to the terminal."""
    bar = training_bar(progress_bar) if hasattr(progress_bar, "_train_progress_bar") else None
    return nullcontext() if bar is None else type(bar).external_write_mode()
