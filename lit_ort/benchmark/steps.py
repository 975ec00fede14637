"""A module and a batch as a training step: forward, loss, backward, clip, optimizer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lit_ort._compat.torch_fx import tree_leaves
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.eager import autocast_for
from lit_ort.backend.steps import LogRecorder, dynamo_settings, in_place_of
from lit_ort.benchmark.result import INDUCTOR, ORT
from lit_ort.errors import OptionsError
from lit_ort.options import BF16_MIXED, FLOAT32

LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is timed.

    Args:
        module: a LightningModule, or a module that returns its loss, an output with a `loss`, or a dictionary with one.
        batch: of `training_step`; else a dictionary of keyword arguments, a tuple of arguments, or the only argument.
        clip: the largest norm of the gradients, or None.
        loss: from the module's output to a scalar, where it is none of these.
    """

    module: nn.Module
    batch: Any
    clip: float | None = None
    loss: Callable[[Any], Tensor] | None = None

    def __post_init__(self) -> None:
        if not getattr(self.module, "automatic_optimization", True):
            raise OptionsError(
                f"{type(self.module).__name__} optimizes manually, and a step to time has one loss. Pass a module that "
                "returns the loss of one of its parts."
            )

    @property
    def is_lightning(self) -> bool:
        return hasattr(self.module, "training_step")

    def copy(self) -> Workload:
        """Of a module of its own."""
        return dataclasses.replace(self, module=copy.deepcopy(self.module))

    def forward(self, module: Any, batch: Any) -> Tensor:
        """The loss."""
        if self.is_lightning:
            output = module.training_step(batch, 0)
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
                "pass loss=, a function from the module's output to it."
            )
        return loss

    @contextmanager
    def without_trainer(self) -> Iterator[None]:
        """Takes what a LightningModule logs, which there is no Trainer for."""
        if not self.is_lightning:
            yield
            return
        recorder = LogRecorder()
        with in_place_of(self.module, "log", recorder.log):
            yield


class Runner:
    """One way to run a workload's step.

    Args:
        baseline: `eager`, `inductor` or `ort`.
        workload: of a module of its own.
        low_precision: under autocast to bfloat16.
        backend: of `ort`.
    """

    def __init__(self, baseline: str, workload: Workload, low_precision: bool, backend: ORTBackend | None) -> None:
        self.workload = workload
        self.backend = backend
        self._settings: Callable[[], AbstractContextManager[Any]] = nullcontext
        if baseline == ORT:
            self._settings = lambda: dynamo_settings("training_step", strict=False)
        self._precision = BF16_MIXED if low_precision else FLOAT32
        compiler = {INDUCTOR: "inductor", ORT: backend}.get(baseline)
        self._forward: Callable[..., Tensor] = workload.forward
        if compiler is not None:
            # A function of its own for each runner: Dynamo keeps what it compiled with the function's code.
            self._forward = torch.compile(lambda module, batch: workload.forward(module, batch), backend=compiler)
        self._optimizer = optimizer_of(workload.module)

    def gradients(self) -> Tensor:
        """The loss of a forward, its backward done."""
        for parameter in self.workload.module.parameters():
            parameter.grad = None
        with autocast_for(self._precision), self._settings(), self.workload.without_trainer():
            loss = self._forward(self.workload.module, self.workload.batch)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """A whole step."""
        self.gradients()
        if self.workload.clip is not None:
            clip_grad_norm_(self.workload.module.parameters(), self.workload.clip)
        self._optimizer.step()


def optimizer_of(module: Any) -> torch.optim.Optimizer:
    """The first optimizer that a LightningModule configures, else fused AdamW over what learns.

    Raises:
        OptionsError: nothing learns.
    """
    if hasattr(module, "configure_optimizers"):
        leaves = tree_leaves(module.configure_optimizers())
        found = next((leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)), None)
        if found is not None:
            return found
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not learning:
        raise OptionsError(
            f"{type(module).__name__} has no parameter that needs a gradient, so that no step trains it."
        )
    return torch.optim.AdamW(learning, LEARNING_RATE, fused=True)


def without_dropout(workload: Workload) -> Workload:
    """A copy whose dropout probabilities are zero, wherever a module or its configuration keeps one."""
    copied = workload.copy()
    for module in copied.module.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
                if isinstance(value, float) and (name == "p" or "drop" in name):
                    holder.__dict__[name] = 0.0
    return copied
