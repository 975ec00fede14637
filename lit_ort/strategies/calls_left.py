"""How often a Trainer calls a step until the end of its run, as far as it knows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lit_ort._compat.lightning import own_class_of

_RUNS = {"validation_step": "validate_loop", "test_step": "test_loop", "predict_step": "predict_loop"}


def calls_left(trainer: Any, step: str, dataloader: int = 0) -> float | None:
    """The number of calls of a step that follow, if no callback ends the run early; None if it is unknown.

    Args:
        trainer: of either of Lightning's packages.
        step: the step's name.
        dataloader: the index of the dataloader of a validation, test or predict step.
    """
    fits = str(getattr(trainer.state.fn, "value", trainer.state.fn)) == "fit"
    if step == "training_step":
        left = _training_batches(trainer)
    elif fits:
        left = _validation_batches(trainer, dataloader)
    else:
        left = _batches_of_run(getattr(trainer, _RUNS[step]), dataloader)
    return max(left, 0.0) if math.isfinite(left) else None


def _training_batches(trainer: Any) -> float:
    batches, epochs, steps = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    by_epochs = math.inf
    if epochs is not None and epochs >= 0 and math.isfinite(batches):
        by_epochs = (epochs - trainer.current_epoch) * batches - done
    by_steps = math.inf
    if steps is not None and steps >= 0:
        # Manual optimization counts the steps of all optimizers.
        optimizers = 1 if trainer.lightning_module.automatic_optimization else max(1, len(trainer.optimizers))
        by_steps = (steps - trainer.global_step) * trainer.accumulate_grad_batches / optimizers - 1
    return min(by_epochs, by_steps, *_batches_until_time_is_up(trainer))


def _batches_until_time_is_up(trainer: Any) -> Iterator[float]:
    """For `max_time`, the batches that follow if they take as long as those so far."""
    for timer in (callback for callback in trainer.callbacks if own_class_of(callback).__name__ == "Timer"):
        seconds, elapsed = timer.time_remaining(), timer.time_elapsed()
        if seconds is not None and elapsed:
            yield seconds / elapsed * (trainer.fit_loop.epoch_loop.total_batch_idx + 1)


def _batches_of_run(loop: Any, dataloader: int) -> float:
    """The batches of a dataloader that follow in the run of a loop, which reads one dataloader after the other."""
    sizes = (_size(loop.max_batches, k) for k in range(dataloader + 1))
    return max(sum(sizes) - loop.batch_progress.current.ready, 0.0)


def _validation_batches(trainer: Any, dataloader: int) -> float:
    size = _size(trainer.num_val_batches, dataloader)
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    # Without a number of epochs the interval is of batches of all epochs.
    is_of_epoch = epochs is not None and every is not None and every >= trainer.num_training_batches
    if every is None or not math.isfinite(every) or is_of_epoch:
        every = trainer.num_training_batches
    if not (math.isfinite(every) and every > 0):
        return math.inf
    now = _batches_of_run(trainer.fit_loop.epoch_loop.val_loop, dataloader) if trainer.validating else 0
    return now + size * (_training_batches(trainer) // (every * (epochs or 1)))


def _size(batches: Any, dataloader: int) -> float:
    sizes = batches if isinstance(batches, list) else [batches]
    return sizes[dataloader] if dataloader < len(sizes) else math.inf
