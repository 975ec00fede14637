"""The training steps of benchmarks: a module, a batch, and a step from the loss to the optimizer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from lit_ort_tasks.bert_pretrain import pretraining_figures
from lit_ort_tasks.gpt2 import next_token_loss
from lit_ort_tasks.transformer_lm import TransformerLM
from torch import nn
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel

from lit_ort import ORTBackend, ORTOptions
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.parameter_updates import Clipping, Updates

CLIP = 0.5
LEARNING_RATE = 1e-3
BASELINES = ("eager", "inductor", "ort")


@dataclasses.dataclass(frozen=True)
class Workload:
    """One workload.

    Args:
        name: its name on the command line.
        configuration: the dimensions, for a table.
        floating_point_operations: those of one step's matmuls, forward and backward.
        build: creates the module.
        batch: creates a batch for `loss`.
        loss: returns a scalar loss from module and batch.
    """

    name: str
    configuration: str
    floating_point_operations: float
    build: Callable[[], Any]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], torch.Tensor]


def transformer_lm(vocabulary: int = 28_782, layers: int = 2) -> Workload:
    """The language model of PyTorch's tutorial: encoder layers of width 200, 35 x 20 tokens."""
    length, batch, width = 35, 20, 200
    tokens = length * batch
    per_layer = tokens * 12 * width * width + 4 * tokens * length * width
    matmuls = 2 * tokens * width * vocabulary + layers * per_layer

    def make_batch() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randint(vocabulary, (length, batch)) for _ in range(2))

    return Workload(
        name="transformer_lm",
        configuration=f"{layers} layers, width {width}, {vocabulary:,} words, {length}x{batch} tokens, dropout 0.2",
        floating_point_operations=3 * matmuls,
        build=lambda: TransformerLM(vocabulary, layers=layers),
        batch=make_batch,
        loss=lambda module, batch: module.loss(batch),
    )


def gpt2(layers: int = 4, batch: int = 2, length: int = 256) -> Workload:
    """GPT-2 with the width and vocabulary of GPT-2 small, and by default fewer layers."""
    shape = GPT2Config(n_layer=layers, n_positions=max(length, 1024))
    tokens, width = batch * length, shape.n_embd
    matmuls = 2 * tokens * width * shape.vocab_size + layers * _layer_matmuls(tokens, length, width)

    def make_batch() -> dict[str, torch.Tensor]:
        stream = torch.randint(shape.vocab_size, (batch, length + 1))
        return {"input_ids": stream[:, :-1].contiguous(), "targets": stream[:, 1:].contiguous()}

    return Workload(
        name="gpt2",
        configuration=f"{layers} layers, width {width}, {shape.vocab_size:,} tokens, {batch}x{length}, dropout 0.1",
        floating_point_operations=3 * matmuls,
        build=lambda: GPT2LMHeadModel(shape),
        batch=make_batch,
        loss=next_token_loss,
    )


def bert(layers: int = 4, batch: int = 4, length: int = 128) -> Workload:
    """BERT pre-training with BERT base's width and vocabulary, and by default fewer layers; 15 % of tokens masked."""
    shape = BertConfig(num_hidden_layers=layers, use_cache=False)
    tokens, width = batch * length, shape.hidden_size
    head = 2 * tokens * width * (shape.vocab_size + width)
    matmuls = head + layers * _layer_matmuls(tokens, length, width)

    def make_batch() -> dict[str, torch.Tensor]:
        ids = torch.randint(shape.vocab_size, (batch, length))
        return {
            "input_ids": ids,
            "token_type_ids": (torch.arange(length) > length // 2).long().expand(batch, length).contiguous(),
            "attention_mask": torch.ones(batch, length, dtype=torch.int64),
            "labels": torch.where(torch.rand(batch, length) < 0.15, ids, -100),
            "next_sentence_label": torch.randint(2, (batch,)),
        }

    return Workload(
        name="bert",
        configuration=f"{layers} layers, width {width}, {shape.vocab_size:,} tokens, {batch}x{length}, dropout 0.1",
        floating_point_operations=3 * matmuls,
        build=lambda: BertForPreTraining(shape),
        batch=make_batch,
        loss=lambda module, batch: pretraining_figures(module, batch)["loss"],
    )


def _layer_matmuls(tokens: int, length: int, width: int) -> int:
    """The floating-point operations of a layer's matmuls in the forward; the feed-forward has 4 times the
    width.
    """
    return tokens * 24 * width * width + 4 * tokens * length * width


WORKLOADS: dict[str, Callable[[], Workload]] = {"bert": bert, "gpt2": gpt2, "transformer_lm": transformer_lm}


class Baseline:
    """Runs a workload in one baseline, with a separate module and optimizer.

    Args:
        name: `eager`, `inductor` or `ort`; `ort-PASS` disables a pass, `ort+spinning` has spinning threads and
            `ort+updates` the optimizer in the graph. All can be followed by `+recompute`, which recomputes activations,
            and by `@bf16` for mixed precision.
        workload: the step.
        cache_dir: the folder of `ort`'s compiled graphs, or None.
        clip: the maximum norm of all gradients; 0 for no clipping, None for gradients only, without an optimizer.
    """

    def __init__(self, name: str, workload: Workload, cache_dir: str | None = None, clip: float | None = CLIP) -> None:
        torch.manual_seed(0)
        self._cache_dir, self._clipping = cache_dir, Clipping(clip or 0.0)
        engine, _, precision = name.partition("@")
        if precision not in ("", "bf16"):
            raise ValueError(
                f"baseline {name!r} has the precision {precision!r}, which is not bf16. Use {engine} or {engine}@bf16."
            )
        self._bf16 = precision == "bf16"
        self._engine, *suffixes = engine.split("+")
        self._recompute, self._spinning, updates = (s in suffixes for s in ("recompute", "spinning", "updates"))
        self._pool = BufferPool()
        self._updates = Updates(self._pool) if updates else None
        self.module = workload.build()
        if self._recompute and not self.is_ort:
            self.module.activation_checkpointing_enable()
        parameters = self.module.parameters()
        self.optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, fused=True) if clip is not None else None
        self._loss = self._compile(workload.loss)

    @property
    def is_ort(self) -> bool:
        return self._engine.startswith("ort")

    def _compile(self, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        if not self.is_ort:
            run = loss if self._engine == "eager" else torch.compile(loss, backend=self._engine)
            return _in_bf16(run) if self._bf16 else run
        disabled_pass = self._engine.removeprefix("ort").removeprefix("-")
        options = ORTOptions(
            fallback="error",
            precision="bf16-mixed" if self._bf16 else "32-true",
            recompute="layers" if self._recompute else None,
            allow_spinning=self._spinning,
            optimizer_in_graph=self._updates is not None,
            disable_passes=(disabled_pass,) if disabled_pass else (),
            cache_dir=self._cache_dir,
        )
        return torch.compile(loss, backend=ORTBackend(options, pool=self._pool, updates=self._updates))

    def step(self, batch: Any) -> float:
        """Runs a step and returns its time in milliseconds.

        Loss, zero_grad, backward, clipping and optimizer run in Lightning's order; as with ORTStrategy, gradients are
        freed before the loss in `ort`.
        """
        start = time.perf_counter()
        if self._updates is None or self.optimizer is None:
            self._backward(batch)
            updated = False
        else:
            with self._updates.step(self.optimizer, self._clipping) as step:
                self._backward(batch)
            updated = step.updated
        if self.optimizer is not None and not updated:
            self._clipping(list(self.module.parameters()))
            self.optimizer.step()
        return (time.perf_counter() - start) * 1e3

    def _backward(self, batch: Any) -> None:
        if self.is_ort:
            self.module.zero_grad()
        loss = self._loss(self.module, batch)
        self.module.zero_grad()
        loss.backward()


def _in_bf16(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps a loss in `torch.autocast` to bfloat16."""

    def run(module: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(module, batch)

    return run
