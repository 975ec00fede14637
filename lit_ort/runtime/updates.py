"""Optimizer steps inside a run: a parameter changes as soon as its gradient is there, which then is free.

The optimizer is torch's own, and so is its state.

Source: Lv et al. 2023, LOMO, and PyTorch's tutorial on the optimizer step in the backward, for updates by parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from lit_ort._compat.torch import version_of
from lit_ort.errors import SessionError
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.nodes import RunState
from lit_ort.runtime.session import Session

# The operator that gives a gradient to the optimizer of its run.
HAND_OVER = "lit_ort.hand_over.default"

_REMEDY = (
    "Weights have changed, so go on from the last checkpoint, with optimizer_in_graph=False: it is for steps whose "
    "loss and gradients are those of one graph."
)


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Trainer's clipping, by `value` of each gradient or by `norm` of all; a limit of 0 clips nothing."""

    limit: float = 0.0
    by_value: bool = False

    @property
    def needs_all(self) -> bool:
        """Whether it looks at all gradients at once."""
        return self.limit > 0 and not self.by_value

    def __call__(self, parameters: list[torch.Tensor]) -> None:
        if self.limit > 0:
            clip = torch.nn.utils.clip_grad_value_ if self.by_value else torch.nn.utils.clip_grad_norm_
            clip(parameters, self.limit)


@dataclasses.dataclass
class Step:
    """One optimizer step while its closure runs.

    Args:
        runs: the graphs with gradients that it has run.
        handed: the gradients that went to autograd, by address, with what autograd's own additions would change.
        updated: whether one of the runs has updated.
    """

    optimizer: Optimizer
    clipping: Clipping
    runs: list[Session] = dataclasses.field(default_factory=list)
    handed: dict[int, int] = dataclasses.field(default_factory=dict)
    updated: bool = False

    @property
    def waits(self) -> bool:
        """Whether no parameter can change before all gradients are there."""
        return self.clipping.needs_all or not is_by_parameter(self.optimizer)

    @property
    def parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def gave(self, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is what a run gave, with nothing added."""
        return gradient is not None and self.handed.get(gradient.data_ptr()) == version_of(gradient)


class Updates:
    """The optimizer steps of one strategy's graphs.

    The first step of a graph hands its gradients out, which shows whether they are all that the step has; from then on
    its runs update. Without a step in progress, as in accumulation, gradients are handed out.

    Args:
        pool: the memory of those graphs' kernels.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._step: Step | None = None
        self._running: _Running | None = None
        # Graphs whose gradients were all that a step had.
        self._proven: WeakSet[Session] = WeakSet()

    @contextmanager
    def step(self, optimizer: Optimizer, clipping: Clipping) -> Iterator[Step]:
        """Around the closure of an optimizer step: training step, zero_grad and backward.

        Raises:
            SessionError: a run has updated, and code outside of it has gradients for the same step.
        """
        self._step = step = Step(optimizer, clipping)
        try:
            yield step
        finally:
            self._step = None
        left = [parameter for parameter in step.parameters if parameter.grad is not None]
        if step.updated and left:
            raise SessionError(
                f"optimizer_in_graph: the run of this step has updated its weights, and {len(left)} parameters have "
                "gradients of code outside of it",
                remedy=_REMEDY,
            )
        if len(step.runs) == 1 and all(step.gave(parameter.grad) for parameter in left):
            self._proven.add(step.runs[0])
            self._update_after_backward(step)

    @contextmanager
    def run(self, graph: Session, inputs: Sequence[torch.Tensor], count: int) -> Iterator[None]:
        """Around the run of a graph that hands over `count` gradients.

        Raises:
            SessionError: another graph has updated in this step.
        """
        step = self._step
        if step is not None:
            if step.updated:
                raise SessionError(
                    "optimizer_in_graph: a second graph with gradients runs in a step whose first one updated weights",
                    remedy=_REMEDY,
                )
            fresh = not step.runs and all(parameter.grad is None for parameter in step.parameters)
            step.runs.append(graph)
            if fresh and graph in self._proven:
                self._running = _Running(step, inputs, count)
        try:
            yield
        finally:
            self._running = None

    def hand_out(self, gradients: Iterable[torch.Tensor], scale: float) -> None:
        """Notes what goes to autograd.

        Args:
            scale: the gradient that came back for the loss; scaled by it, gradients are no longer what a run gave.

        Raises:
            SessionError: the run has updated, and something outside of the graph scales its loss.
        """
        step = self._step
        if step is not None and step.updated and scale != 1.0:
            raise SessionError(
                f"optimizer_in_graph: the run of this step has updated its weights, and its loss is scaled by {scale} "
                "outside of the graph",
                remedy=_REMEDY,
            )
        if step is not None:
            step.handed.update((gradient.data_ptr(), version_of(gradient)) for gradient in gradients)

    def _update_after_backward(self, step: Step) -> None:
        """Keeps a first step from setting the peak: its gradients make room for what the optimizer makes of them."""
        if step.waits:
            return
        self._pool.trim()
        for parameter in [parameter for parameter in step.parameters if parameter.grad is not None]:
            step.clipping([parameter])
            step_alone(step.optimizer, [parameter])
            self._pool.trim()
        step.updated = True

    def hand_over(self, state: RunState, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient itself, or nothing where the parameter has been updated by it.

        Args:
            gradient: of the parameter.
            parameter: its value, in its own memory.
        """
        running, gradient = self._running, gradient.contiguous()
        return gradient if running is None or not running.take(gradient, parameter) else gradient.new_empty(0)


class _Running:
    """A run that updates."""

    def __init__(self, step: Step, inputs: Sequence[torch.Tensor], count: int) -> None:
        owned = {id(parameter) for parameter in step.parameters}
        self._parameters = {tensor.data_ptr(): tensor for tensor in inputs if id(tensor) in owned}
        self._step, self._left = step, count
        self._waiting: list[torch.Tensor] = []

    def take(self, gradient: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the optimizer takes a gradient."""
        self._left -= 1
        parameter = self._parameters.get(value.data_ptr())
        if parameter is not None:
            parameter.grad = gradient
            self._waiting.append(parameter)
        if self._waiting and not (self._step.waits and self._left):
            waiting, self._waiting = self._waiting, []
            self._step.updated = True
            self._step.clipping(waiting)
            step_alone(self._step.optimizer, waiting)
        return parameter is not None


def is_taken(gradient: torch.Tensor) -> bool:
    """Whether an optimizer has taken a gradient in the run that gives it; one of no elements has nothing to give."""
    return gradient.numel() == 0


def is_by_parameter(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step on each parameter by itself is its step on all: torch's own keep all they know by
    parameter, and others may keep a count of steps with a group.
    """
    return type(optimizer).__module__.startswith("torch.optim.")


def step_alone(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """A step of an optimizer on some of its parameters, with its own options and state; takes their gradients."""
    view = object.__new__(type(optimizer))
    view.__dict__.update(optimizer.__dict__)
    if is_by_parameter(optimizer):
        chosen = {id(parameter) for parameter in parameters}
        groups = ({**g, "params": [p for p in g["params"] if id(p) in chosen]} for g in optimizer.param_groups)
        view.param_groups = [group for group in groups if group["params"]]
    type(optimizer).step(view)
    for parameter in parameters:
        parameter.grad = None
