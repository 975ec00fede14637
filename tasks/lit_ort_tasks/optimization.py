"""Parameter groups, optimizers and learning-rate schedules, the same for every task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import optimization as schedules

from lit_ort._compat.torch_optim import take_no_loss_scale
from lit_ort_tasks.errors import require


@dataclass(frozen=True)
class Schedule:
    """A learning rate that rises in a warm-up and then stays or falls, set anew at every optimizer step.

    Args:
        shape: `constant`, `linear` (to zero), `cosine` (half a cosine to zero) or `polynomial` (to `end_rate`).
        warmup: below 1 the share of all steps in which the rate rises linearly from zero, otherwise their number.
        total_steps: steps until the end of the fall; None is what the trainer will run.
        power: of the polynomial.
        end_rate: where the polynomial ends.

    Raises:
        InputError: an unknown shape, or a figure that no schedule can have.

    Source: the schedules of the transformers library; the polynomial with power 0.5 is that of BERT's LAMB recipe,
    except that it falls from the end of the warm-up on rather than from where the whole curve would be then.
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
            self.warmup >= 0 and (self.warmup < 1 or self.warmup == int(self.warmup)),
            f"scheduler.warmup={self.warmup}: must be a share of all steps below 1, or a whole number of steps. Give "
            "0.1 for a tenth, 500 for five hundred steps, 0 for none.",
        )
        require(
            self.total_steps is None or self.total_steps >= 1,
            f"scheduler.total_steps={self.total_steps}: must be at least 1. Give the steps until the rate has fallen, "
            "or null for those that the trainer runs.",
        )

    def __call__(self, optimizer: Optimizer, trainer_steps: float) -> LRScheduler:
        """The schedule for an optimizer that will make `trainer_steps` steps.

        Raises:
            InputError: the length is needed, and neither the schedule nor the trainer has one.
        """
        steps = self.total_steps if self.total_steps is not None else trainer_steps
        needs_end = self.shape != "constant" or 0 < self.warmup < 1
        require(
            steps != float("inf") or not needs_end,
            f"scheduler.total_steps=null: the trainer has no last step, which {self.shape} with warmup={self.warmup} "
            "needs. Set trainer.max_steps, trainer.max_epochs or scheduler.total_steps.",
        )
        warmup = int(self.warmup if self.warmup >= 1 else self.warmup * steps)
        return _SHAPES[self.shape](optimizer, self, warmup, steps)


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

# Either a Schedule, which advances at every step, or one of torch's, which advances at every epoch.
ScheduleFactory: TypeAlias = "Schedule | Callable[[Optimizer], LRScheduler]"


def weight_decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups of parameters: those that decay as the optimizer says, and biases and norms, which don't."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1]},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def configure_optimizers(
    module: LightningModule,
    parameters: Iterable[Any],
    optimizer: Callable[..., Optimizer],
    schedule: ScheduleFactory | None,
) -> Any:
    """What Lightning's `configure_optimizers` returns."""
    made = optimizer(parameters)
    # Fused ones could take a loss scale themselves, for which Lightning's mixed precision refuses to clip gradients.
    take_no_loss_scale(made)
    if schedule is None:
        return made
    if not isinstance(schedule, Schedule):
        return {"optimizer": made, "lr_scheduler": schedule(made)}
    steps = schedule(made, module.trainer.estimated_stepping_batches)
    return {"optimizer": made, "lr_scheduler": {"scheduler": steps, "interval": "step"}}
