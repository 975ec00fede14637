"""Parameter groups, optimizers and learning-rate schedules of all tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from transformers import optimization as schedules

from lit_ort._compat.torch_optim import take_no_loss_scale
from lit_ort_tasks.errors import require, require_whole
from lit_ort_tasks.rules import is_number, is_whole


@dataclass(frozen=True)
class Schedule:
    """A learning rate that increases in a warm-up and is then constant or decreases, with every optimizer step.

    Args:
        shape: `constant`, `linear` (to zero), `cosine` (half a cosine to zero) or `polynomial` (to `end_rate`).
        warmup: the steps in which the rate increases linearly from zero: below 1 their share of all steps, otherwise
            their number.
        total_steps: the step at which the decrease ends; None for the number of steps of the trainer.
        power: of the polynomial.
        end_rate: the last rate of the polynomial.

    Raises:
        InputError: the shape is unknown, or a number is out of range.

    Source: the schedules of the transformers library. The polynomial with power 0.5 is that of BERT's LAMB recipe,
    except that it starts at the full rate when the warm-up ends, where the recipe continues the curve from step 0.
    """

    shape: str
    warmup: float = 0.0
    total_steps: int | None = None
    power: float = 1.0
    end_rate: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.shape in _SHAPES,
            f"scheduler.shape={self.shape}: no such schedule. Choose from {', '.join(_SHAPES)}.",
        )
        require(
            is_number(self.warmup) and self.warmup >= 0 and (self.warmup < 1 or self.warmup == int(self.warmup)),
            f"scheduler.warmup={_shown(self.warmup)}: must be a share of all steps below 1, or a whole number of steps."
            " Give 0.1 for a tenth, 500 for five hundred steps, 0 for none.",
        )
        require(
            self.total_steps is None or (is_whole(self.total_steps) and self.total_steps >= 1),
            f"scheduler.total_steps={self.total_steps}: must be a whole number of at least 1. Give the step at which "
            "the decrease ends, or null for the number of steps of the trainer.",
        )
        require(
            is_number(self.power) and self.power > 0,
            f"scheduler.power={_shown(self.power)}: must be a number above 0. Give 1.0 for a straight line.",
        )
        require(
            is_number(self.end_rate) and self.end_rate >= 0,
            f"scheduler.end_rate={_shown(self.end_rate)}: must be a number of at least 0. Give the last rate.",
        )

    def __call__(self, optimizer: Optimizer, trainer_steps: float) -> LRScheduler:
        """Return the schedule for an optimizer with `trainer_steps` steps.

        Raises:
            InputError: the shape needs a number of steps, and neither the schedule nor the trainer has one, or the
                rate has no steps or no room to decrease.
        """
        steps = self.total_steps if self.total_steps is not None else trainer_steps
        needs_end = self.shape != "constant" or 0 < self.warmup < 1
        require(
            steps != float("inf") or not needs_end,
            f"scheduler.total_steps=null: the trainer has no last step, which {self.shape} with warmup={self.warmup} "
            "needs. Set trainer.max_steps, trainer.max_epochs or scheduler.total_steps.",
        )
        warmup = int(self.warmup if self.warmup >= 1 else self.warmup * steps)
        require(
            self.shape == "constant" or warmup < steps,
            f"scheduler.warmup={self.warmup}: must be below the number of all steps, {steps:.0f}, after which nothing "
            f"of {self.shape} is left. Give fewer, or a share such as 0.1.",
        )
        rate = optimizer.defaults["lr"]
        require(
            self.shape != "polynomial" or self.end_rate < rate,
            f"scheduler.end_rate={self.end_rate}: must be below optimizer.lr={rate}, from which the rate decreases. "
            "Give a smaller one.",
        )
        return _SHAPES[self.shape](optimizer, self, warmup, steps)


def _shown(value: object) -> object:
    return "null" if value is None else value


def _constant(optimizer: Optimizer, schedule: Schedule, warmup: int, steps: float) -> LRScheduler:
    return schedules.get_constant_schedule_with_warmup(optimizer, warmup)


def _linear(optimizer: Optimizer, schedule: Schedule, warmup: int, steps: float) -> LRScheduler:
    return schedules.get_linear_schedule_with_warmup(optimizer, warmup, int(steps))


def _cosine(optimizer: Optimizer, schedule: Schedule, warmup: int, steps: float) -> LRScheduler:
    return schedules.get_cosine_schedule_with_warmup(optimizer, warmup, int(steps))


def _polynomial(optimizer: Optimizer, schedule: Schedule, warmup: int, steps: float) -> LRScheduler:
    return schedules.get_polynomial_decay_schedule_with_warmup(
        optimizer, warmup, int(steps), lr_end=schedule.end_rate, power=schedule.power
    )


_SHAPES: dict[str, Callable[[Optimizer, Schedule, int, float], LRScheduler]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "polynomial": _polynomial,
}

# A Schedule, which advances at every step, or a schedule of torch, which advances at every epoch.
ScheduleFactory: TypeAlias = "Schedule | Callable[[Optimizer], LRScheduler]"


def no_schedule(**_: Any) -> None:
    """Return the schedule of a constant rate, which is None, whatever options a task sets for other schedules."""


def step_schedule(*, step_size: int, gamma: float, **others: Any) -> Callable[[Optimizer], LRScheduler]:
    """Return a factory of torch's StepLR.

    Raises:
        InputError: a value is invalid, or there are options of other schedules, which a task sets.
    """
    require_whole("scheduler", step_size=step_size)
    require(
        is_number(gamma) and gamma > 0,
        f"scheduler.gamma={gamma!r}: must be a number above 0, by which the learning rate is multiplied. Give one.",
    )
    names = ", ".join(f"scheduler.{name}" for name in others)
    remedy = " ".join(f"~scheduler.{name}" for name in others)
    require(not others, f"scheduler=step: has no option {names}, which the task sets. Delete it: {remedy}.")
    return partial(StepLR, step_size=step_size, gamma=gamma)


def weight_decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: with the optimizer's weight decay, and biases and norms without it."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1]},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def configure_optimizers(
    module: LightningModule,
    parameters: Iterable[Any],
    optimizer_factory: Callable[..., Optimizer],
    schedule: ScheduleFactory | None,
) -> Any:
    """Return the value of Lightning's `configure_optimizers`."""
    optimizer = optimizer_factory(parameters)
    # A fused optimizer can apply a loss scale, and then Lightning's mixed precision refuses to clip gradients.
    take_no_loss_scale(optimizer)
    if schedule is None:
        return optimizer
    if not isinstance(schedule, Schedule):
        return {"optimizer": optimizer, "lr_scheduler": schedule(optimizer)}
    steps = module.trainer.estimated_stepping_batches
    if module.trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
        # A whole run has more of them than the warm-up.
        steps = max(steps, schedule.warmup + 1)
    scheduler = schedule(optimizer, steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
