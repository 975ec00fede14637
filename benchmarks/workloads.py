"""The training steps that benchmarks time: a module, a batch, and the step from loss to optimizer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lit_ort import ORTBackend, ORTOptions
from tasks.transformer_lm import TransformerLM

CLIP = 0.5
LEARNING_RATE = 1e-3
RIVALS = ("eager", "inductor", "ort")


@dataclasses.dataclass(frozen=True)
class Workload:
    """One workload.

    Args:
        name: as on the command line.
        configuration: the figures that a table states.
        floating_point_operations: of one step's matrix products, forward and backward.
        build: makes the module.
        batch: makes the inputs of `loss`.
        loss: from module and batch to a scalar.
    """

    name: str
    configuration: str
    floating_point_operations: float
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, ...]]
    loss: Callable[[Any, tuple[torch.Tensor, ...]], torch.Tensor]


def transformer_lm(vocabulary: int = 28_782) -> Workload:
    """The seeds' language model: 2 encoder layers of width 200 on 35 x 20 tokens."""
    length, batch, width, layers = 35, 20, 200, 2
    tokens = length * batch
    per_layer = tokens * 12 * width * width + 4 * tokens * length * width
    products = 2 * tokens * width * vocabulary + layers * per_layer

    def make_batch() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randint(vocabulary, (length, batch)) for _ in range(2))

    return Workload(
        name="transformer_lm",
        configuration=f"{layers} layers, width {width}, {vocabulary:,} words, {length}x{batch} tokens, dropout 0.2",
        floating_point_operations=3 * products,
        build=lambda: TransformerLM(vocabulary),
        batch=make_batch,
        loss=lambda module, given: module.loss(given),
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {"transformer_lm": transformer_lm}


class Rival:
    """One way to run a workload, with a module, optimizer and gradients of its own.

    Args:
        name: `eager`, `inductor`, `ort`; `ort-PASS` is `ort` without that pass, `ort+spinning` with spinning threads.
        workload: what to run.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        torch.manual_seed(0)
        self.name = name
        self.module = workload.build()
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=LEARNING_RATE, fused=True)
        self._loss = self._compile(workload.loss)

    def _compile(self, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        if self.name == "eager":
            return loss
        if self.name == "inductor":
            return torch.compile(loss, backend="inductor")
        without = self.name.removeprefix("ort").removesuffix("+spinning").removeprefix("-")
        options = ORTOptions(
            fallback="error",
            allow_spinning=self.name.endswith("+spinning"),
            disable_passes=(without,) if without else (),
        )
        return torch.compile(loss, backend=ORTBackend(options))

    def step(self, batch: tuple[torch.Tensor, ...]) -> float:
        """Loss, zero_grad, backward, clip, optimizer, in Lightning's order. Returns milliseconds."""
        start = time.perf_counter()
        loss = self._loss(self.module, batch)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        self.optimizer.step()
        return (time.perf_counter() - start) * 1e3
