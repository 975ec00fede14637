"""Frees the gradients of an earlier step before a run, where nothing can read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lit_ort._compat.lightning import clears_gradients, is_from_lightning
from lit_ort.backend.explanation import CompileLog


class OldGradients:
    """Gradients that Lightning clears between the training step and the backward.

    A run computes the new gradients with the loss, so that the old ones would take memory at the same time. They are
    freed as the run begins: by then Dynamo has traced the code of a step of one graph, and knows whether it can read
    gradients.

    Args:
        compile_log: knows that; also an attribute.
    """

    def __init__(self, compile_log: CompileLog) -> None:
        self.compile_log = compile_log
        self._step: str | None = None
        self._optimizers: Iterable[Any] = ()

    @contextmanager
    def freed_by_run(self, step: str, optimizers: Iterable[Any]) -> Iterator[None]:
        """A context around a step whose first run frees the gradients of optimizers."""
        self._step, self._optimizers = step, optimizers
        try:
            yield
        finally:
            self._step, self._optimizers = None, ()

    def before_run(self) -> None:
        if self._step is None or self.compile_log.may_read_gradients(self._step):
            return
        for optimizer in self._optimizers:
            # Not through `zero_grad`, which Lightning calls once per step, and which an optimizer can override.
            if getattr(type(optimizer), "zero_grad", None) is torch.optim.Optimizer.zero_grad:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
        self._step, self._optimizers = None, ()


def are_cleared_unseen(module: Any) -> bool:
    """Whether Lightning clears a module's gradients after the training step that runs now, and no hook sees that."""
    if not module.automatic_optimization or not clears_gradients(module.trainer):
        return False
    hooks = [getattr(module, hook) for hook in ("on_before_zero_grad", "optimizer_zero_grad")]
    return all(
        map(is_from_lightning, [*hooks, *(callback.on_before_zero_grad for callback in module.trainer.callbacks)])
    )
