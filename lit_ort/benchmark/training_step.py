"""A training step of a module and a batch: forward, loss, backward, clipping and the optimizer's step."""

from __future__ import annotations

import copy
import dataclasses
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lit_ort._compat.dynamo_events import forget
from lit_ort._compat.lightning import is_lightning_module, package_of, step_arguments, trainer_of, trainer_of_steps
from lit_ort._compat.torch_fx import tree_leaves
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.eager import autocast_for
from lit_ort.backend.tracing_settings import LogRecorder, dynamo_settings
from lit_ort.benchmark.result import INDUCTOR, ORT
from lit_ort.errors import OptionsError
from lit_ort.options import BF16_MIXED, FLOAT32

LEARNING_RATE = 1e-4
# The length of schedules, whose first steps are timed.
STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Workload:
    """The step to time.

    Args:
        module: a LightningModule, or a module that returns its loss, an output with a `loss`, or a dictionary with one.
        batch: the batch of `training_step`; for other modules a dictionary of keyword arguments, a tuple of arguments,
            or the only argument.
        clip: the maximum norm of the gradients, or None.
        loss: a function from the module's output to a scalar loss, for other outputs.
        trainer: the Trainer of the module that this one's is a copy of, or None.

    Raises:
        OptionsError: the module uses manual optimization.
    """

    module: nn.Module
    batch: Any
    clip: float | None = None
    loss: Callable[[Any], Tensor] | None = None
    trainer: Any = None

    def __post_init__(self) -> None:
        if not getattr(self.module, "automatic_optimization", True):
            raise OptionsError(
                f"{type(self.module).__name__} uses manual optimization, but a timed step needs a single loss. Pass a "
                "module that returns the loss of one of its parts."
            )

    @property
    def is_lightning(self) -> bool:
        return hasattr(self.module, "training_step")

    def copy(self) -> Workload:
        """The same workload with a copy of the module, which has no Trainer."""
        trainer = trainer_of(self.module) if is_lightning_module(self.module) else None
        return dataclasses.replace(self, module=copy.deepcopy(self.module), trainer=trainer or self.trainer)

    def forward(self, module: Any, batch: Any) -> Tensor:
        """Runs the forward and returns the loss."""
        if self.is_lightning:
            output = module.training_step(*step_arguments(module.training_step, batch))
        elif isinstance(batch, Mapping):
            output = module(**batch)
        else:
            output = module(*batch) if isinstance(batch, (tuple, list)) else module(batch)
        return self._loss_of(output)

    def _loss_of(self, output: Any) -> Tensor:
        if self.loss is not None:
            loss = self.loss(output)
        else:
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise OptionsError(
                f"the step returned a {type(output).__name__} without a scalar loss. Return one from training_step, or "
                "pass loss=, a function from the module's output to the loss."
            )
        return loss

    @contextmanager
    def without_trainer(self) -> Iterator[None]:
        """Replaces `log` of a LightningModule, which would need a Trainer."""
        with LogRecorder(self.module).attached() if self.is_lightning else nullcontext():
            yield


class Runner:
    """Runs a workload's step in one baseline.

    Args:
        baseline: `eager`, `inductor` or `ort`.
        workload: a workload whose module no other runner uses.
        low_precision: whether to run under autocast to bfloat16.
        backend: the backend of `ort`; None for other baselines.
    """

    def __init__(self, baseline: str, workload: Workload, low_precision: bool, backend: ORTBackend | None) -> None:
        self.workload = workload
        self.backend = backend
        self._settings: Callable[[], AbstractContextManager[Any]] = nullcontext
        if backend is not None:
            log = backend.compile_log
            self._settings = lambda: dynamo_settings("training_step", strict=False, compile_log=log)
        self._precision = BF16_MIXED if low_precision else FLOAT32
        compiler = {INDUCTOR: "inductor", ORT: backend}.get(baseline)
        self._forward: Callable[..., Tensor] = workload.forward
        if compiler is not None:
            self._forward = torch.compile(_of_its_own(lambda *args: workload.forward(*args)), backend=compiler)
        self._optimizer = optimizer_of(workload.module, workload.trainer)

    def gradients(self) -> Tensor:
        """Runs forward and backward and returns the loss; gradients are in the parameters."""
        for parameter in self.workload.module.parameters():
            parameter.grad = None
        with autocast_for(self._precision), self._settings(), self.workload.without_trainer():
            loss = self._forward(self.workload.module, self.workload.batch)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """Runs a complete step. As under Lightning, the optimizer can ask for the gradients several times."""
        self._optimizer.step(self._clipped_gradients)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def close(self) -> None:
        """Drops what was compiled for the backend, which Dynamo would keep as long as the process runs."""
        if self.backend is not None:
            forget([self.backend])

    @torch.enable_grad()
    def _clipped_gradients(self) -> Tensor:
        # Some optimizers call it without gradients.
        loss = self.gradients()
        if self.workload.clip is not None:
            clip_grad_norm_(self.workload.module.parameters(), self.workload.clip)
        return loss


def _of_its_own(function: types.FunctionType) -> types.FunctionType:
    """The function with code and a name of its own.

    Dynamo keeps compiled graphs, their number and the sizes that change by the code of a function and by its name: for
    another runner it would compile for any size, or nothing.
    """
    code = function.__code__.replace(co_name=f"step_{uuid.uuid4().hex[:8]}")
    return types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


def optimizer_of(module: Any, trainer: Any = None) -> torch.optim.Optimizer:
    """The first optimizer that a LightningModule configures, otherwise fused AdamW over the trainable parameters.

    Args:
        module: the module.
        trainer: what `configure_optimizers` can ask, for the length of a schedule; None for a Trainer without data.

    Raises:
        OptionsError: there is no trainable parameter, or `configure_optimizers` needs more of a Trainer.
    """
    if hasattr(module, "configure_optimizers"):
        leaves = tree_leaves(_configured(module, trainer))
        optimizer = next((leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)), None)
        if optimizer is not None:
            return optimizer
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        raise OptionsError(
            f"{type(module).__name__} has no parameter that requires a gradient, so it can't be trained. Set "
            "requires_grad on some parameters."
        )
    return torch.optim.AdamW(parameters, LEARNING_RATE, fused=True)


def _configured(module: Any, trainer: Any) -> Any:
    if not is_lightning_module(module):
        return module.configure_optimizers()
    module.trainer = trainer_of_steps(package_of(module), STEPS) if trainer is None else trainer
    try:
        return module.configure_optimizers()
    # User code can raise any exception.
    except Exception as error:
        if trainer is not None:
            raise
        raise OptionsError(
            f"{type(module).__name__}.configure_optimizers fails with a Trainer of {STEPS} steps and without data: "
            f"{type(error).__name__}: {error}. Pass the module after trainer.fit, whose Trainer is then asked."
        ) from error
    finally:
        module.trainer = None


def without_dropout(workload: Workload) -> Workload:
    """A copy with all drop probabilities set to zero."""
    copied = workload.copy()
    set_dropout_to_zero(copied.module)
    return copied


def set_dropout_to_zero(module: nn.Module) -> None:
    """Sets all drop probabilities of a module, of its parts and of their configurations to zero.

    They are the numbers whose name contains "drop", and those below 1 with the name `p`, which the order of a norm has
    too.
    """
    for part in module.modules():
        for owner in (part, getattr(part, "config", None)):
            for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
                if isinstance(value, float) and ("drop" in name or (name == "p" and value < 1)):
                    owner.__dict__[name] = 0.0
