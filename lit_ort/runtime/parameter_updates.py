"""Optimizer steps inside a run: a parameter is updated soon after its gradient is computed, which is then freed.

The optimizer and its state are torch's own.

Source: Lv et al. 2023, LOMO, and PyTorch's tutorial on the optimizer step in the backward, for updates by parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from lit_ort._compat.torch import version_of
from lit_ort.errors import SessionError
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.fused_form import fused_form
from lit_ort.runtime.nodes import RunState
from lit_ort.runtime.session import Session

# The operator that passes a gradient to the optimizer of its run.
HAND_OVER = "lit_ort.hand_over.default"

# Small gradients wait for one update of all of them, since each costs as much as about 100 kB of its work.
_BATCH_BYTES = 4 * 2**20

_REMEDY = (
    "Weights have changed, so resume from the last checkpoint, with optimizer_in_graph=False: True is for steps whose "
    "loss and gradients all come from one graph."
)


@dataclasses.dataclass(frozen=True)
class Clipping:
    """The Trainer's gradient clipping, by value or by the norm of all gradients; a limit of 0 disables it."""

    limit: float = 0.0
    by_value: bool = False

    @property
    def needs_all(self) -> bool:
        """Whether it needs all gradients at once."""
        return self.limit > 0 and not self.by_value

    def __call__(self, parameters: list[torch.Tensor]) -> None:
        if self.limit > 0:
            clip = torch.nn.utils.clip_grad_value_ if self.by_value else torch.nn.utils.clip_grad_norm_
            clip(parameters, self.limit)


@dataclasses.dataclass
class Step:
    """One optimizer step while its closure runs.

    Args:
        optimizer: the optimizer.
        clipping: the gradient clipping before it.
        is_fused: whether the optimizer can use torch's fused form.
        runs: the graphs with gradients that have run in this step.
        returned_versions: the version counters of the gradients that were returned to autograd, by address; autograd
            increments the counter if it accumulates into a gradient.
        updated: whether one of the runs has updated parameters.
        has_backward: whether a backward has asked for the gradients of a run.
        keeps_gradients: whether the next step can read the gradients, so that no run may consume them.
    """

    optimizer: Optimizer
    clipping: Clipping
    is_fused: bool
    runs: list[Session] = dataclasses.field(default_factory=list)
    returned_versions: dict[int, int] = dataclasses.field(default_factory=dict)
    updated: bool = False
    has_backward: bool = False
    keeps_gradients: bool = False

    @property
    def waits(self) -> bool:
        """Whether no parameter can be updated before all gradients are computed."""
        return self.clipping.needs_all

    @property
    def parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def update(self, parameters: list[torch.Tensor]) -> None:
        """Clips the gradients of some parameters, updates these, and frees the gradients."""
        self.updated = True
        self.clipping(parameters)
        step_alone(self.optimizer, parameters, self.is_fused)

    def is_from_run(self, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is exactly the one that a run returned, with nothing accumulated into it."""
        return gradient is not None and self.returned_versions.get(gradient.data_ptr()) == version_of(gradient)


class Updates:
    """The optimizer steps of one strategy's graphs.

    The first step of a graph returns its gradients to autograd, which shows whether the step has any other gradients.
    If it has none, later runs of the graph update the parameters. Outside of a step, as in gradient accumulation,
    gradients are returned to autograd.

    Args:
        pool: the memory of the graphs' kernels.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._step: Step | None = None
        self._running: _Running | None = None
        self._has_updated = False
        # Graphs that computed all gradients of a step.
        self._proven: WeakSet[Session] = WeakSet()

    @contextmanager
    def step(self, optimizer: Optimizer, clipping: Clipping, is_fused: bool = False) -> Iterator[Step]:
        """A context around the closure of an optimizer step: training step, zero_grad and backward.

        Args:
            optimizer: the optimizer.
            clipping: the gradient clipping before its step.
            is_fused: whether it can use torch's fused form.

        Raises:
            SessionError: a run has updated parameters, and code outside of it has gradients for the same step.
        """
        self._step = step = Step(optimizer, clipping, is_fused)
        try:
            yield step
        finally:
            self._step = None
        remaining = [parameter for parameter in step.parameters if parameter.grad is not None]
        if step.updated and remaining:
            raise SessionError(
                f"optimizer_in_graph: the run of this step has updated its weights, but {len(remaining)} parameters "
                "have gradients from code outside of the graph",
                remedy=_REMEDY,
            )
        if step.updated and not step.has_backward:
            raise SessionError(
                "optimizer_in_graph: the run of this step has updated its weights, but the step returned no loss, and "
                "should have left them as they are",
                remedy=_REMEDY,
            )
        self._has_updated |= step.updated
        if step.keeps_gradients or not step.has_backward:
            return
        if len(step.runs) == 1 and all(step.is_from_run(parameter.grad) for parameter in remaining):
            self._proven.add(step.runs[0])
            self._update_after_backward(step)

    @contextmanager
    def run(self, graph: Session, inputs: Sequence[torch.Tensor], count: int) -> Iterator[None]:
        """A context around the run of a graph that passes `count` gradients to the optimizer.

        Raises:
            SessionError: another graph has updated parameters in this step.
        """
        step = self._step
        if step is not None:
            if step.updated:
                raise SessionError(
                    "optimizer_in_graph: a second graph with gradients runs in a step whose first graph has already "
                    "updated weights",
                    remedy=_REMEDY,
                )
            is_first = not step.runs and all(parameter.grad is None for parameter in step.parameters)
            step.runs.append(graph)
            if is_first and graph in self._proven:
                self._running = _Running(step, inputs, count)
        try:
            yield
        finally:
            self._running = None

    def record(self, gradients: Iterable[torch.Tensor], scale: float) -> None:
        """Records the gradients that are returned to autograd.

        Args:
            gradients: the gradients of one run.
            scale: the gradient of the loss; after scaling, gradients are no longer those that the run returned.

        Raises:
            SessionError: the run has updated parameters, but code outside of the graph scales its loss.
        """
        step = self._step
        if step is not None and step.updated and scale != 1.0:
            raise SessionError(
                f"optimizer_in_graph: the run of this step has updated its weights, but its loss is scaled by {scale} "
                "outside of the graph",
                remedy=_REMEDY,
            )
        if step is not None:
            step.has_backward = True
            step.returned_versions.update((gradient.data_ptr(), version_of(gradient)) for gradient in gradients)

    def _update_after_backward(self, step: Step) -> None:
        """Updates parameters one at a time and frees their gradients, so that a graph's first step doesn't set the peak
        of memory.
        """
        if step.waits:
            return
        self._pool.trim()
        for parameter in [parameter for parameter in step.parameters if parameter.grad is not None]:
            step.update([parameter])
            self._pool.trim()
        step.updated = self._has_updated = True

    def start_fit(self) -> None:
        """Begins a fit, whose steps may read gradients: those of an earlier fit were its own."""
        self._has_updated = False

    def require_gradients(self) -> None:
        """Raises SessionError if a run has consumed gradients, which the step that has just run reads."""
        if self._has_updated:
            raise SessionError(
                "optimizer_in_graph: the step reads gradients from this step on, and the run of an earlier step has "
                "consumed them",
                remedy=_REMEDY,
            )

    def hand_over(self, state: RunState, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient itself, or an empty tensor if the optimizer consumed it.

        Args:
            state: the state of the run, which is not used.
            gradient: the gradient of the parameter.
            parameter: the parameter's value, in the parameter's memory.
        """
        running, gradient = self._running, gradient.contiguous()
        return gradient if running is None or not running.take(gradient, parameter) else gradient.new_empty(0)


class _Running:
    """A run that updates parameters."""

    def __init__(self, step: Step, inputs: Sequence[torch.Tensor], count: int) -> None:
        ids = {id(parameter) for parameter in step.parameters}
        self._parameters = {tensor.data_ptr(): tensor for tensor in inputs if id(tensor) in ids}
        self._step, self._remaining = step, count
        self._waiting: list[torch.Tensor] = []
        self._bytes = 0

    def take(self, gradient: torch.Tensor, value: torch.Tensor) -> bool:
        """Accepts a gradient; returns whether the optimizer consumes it."""
        self._remaining -= 1
        parameter = self._parameters.get(value.data_ptr())
        if parameter is not None:
            parameter.grad = gradient
            self._waiting.append(parameter)
            self._bytes += gradient.nbytes
        is_enough = not self._step.waits and self._bytes >= _BATCH_BYTES
        if self._waiting and (is_enough or not self._remaining):
            waiting, self._waiting, self._bytes = self._waiting, [], 0
            self._step.update(waiting)
        return parameter is not None


def is_consumed(gradient: torch.Tensor) -> bool:
    """Whether the optimizer consumed a gradient during the run, or the gradient has no elements anyway."""
    return gradient.numel() == 0


def is_by_parameter(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step on each parameter alone, with its gradient, is the same as its step on all of them.

    torch's own steps store all their state per parameter, and only call a closure that is passed, once and first; a
    step that needs its closure can run it again. Other steps can store state, such as a step count, in a group or in
    the optimizer, and can need other gradients, the loss, or the gradients of changed weights.
    """
    return _is_by_parameter(type(optimizer))


@functools.cache
def _is_by_parameter(kind: type[Optimizer]) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return kind.step.__module__.startswith("torch.optim.") and closure is not None and closure.default is None


def step_alone(optimizer: Optimizer, parameters: Sequence[torch.Tensor], is_fused: bool = False) -> None:
    """Runs the step of an optimizer by parameter on some of them, with its options and state, and clears gradients.

    Args:
        optimizer: the optimizer.
        parameters: those that it updates.
        is_fused: whether it can use torch's fused form.
    """
    view = object.__new__(type(optimizer))
    view.__dict__.update(optimizer.__dict__)
    ids = {id(parameter) for parameter in parameters}
    groups = ({**g, "params": [p for p in g["params"] if id(p) in ids]} for g in optimizer.param_groups)
    view.param_groups = [group for group in groups if group["params"]]
    with fused_form(view) if is_fused else nullcontext():
        type(optimizer).step(view)
    for parameter in parameters:
        parameter.grad = None
