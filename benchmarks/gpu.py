"""Measures training steps on a GPU: eager, inductor, and ONNX Runtime with torch's CUDA kernels as nodes.

    python -m benchmarks.gpu                          # the small models of benchmarks/models
    python -m benchmarks.gpu --models BERT --rounds 50 --bf16

Needs a GPU, torch with CUDA and stock onnxruntime (docs/engines.md). It first compares the loss and the gradients with
eager's, without dropout. Then the baselines run steps in turns (forward, backward, clipping, AdamW), each with a copy
of the module; times are medians of synchronized steps. Prints a line of JSON for each model, and a table.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.models import MODELS
from benchmarks.models.case import SIZES, SMALL, Model
from lit_ort import ORTOptions
from lit_ort._compat.torch_fx import tree_map
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.tracing_settings import dynamo_settings
from lit_ort.benchmark.training_step import set_dropout_to_zero
from lit_ort.options import BF16_MIXED, FLOAT32

EAGER, INDUCTOR, ORT = BASELINES = ("eager", "inductor", "ort")
WARMUP = 5
DEVICE = torch.device("cuda", 0)


def main() -> None:
    arguments = parse()
    if not torch.cuda.is_available():
        sys.exit(
            f"error: torch {torch.__version__} finds no GPU, which this benchmark needs. On the CPU, use "
            "python -m benchmarks.suite."
        )
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}")
    rows = []
    for name in arguments.models:
        precision = BF16_MIXED if arguments.bf16 else FLOAT32
        figures = measure_model(MODELS[name], arguments.size, arguments.rounds, precision, arguments.baselines)
        print(json.dumps({"model": name, **figures}), flush=True)
        rows.append((name, figures))
    print(table(rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL", help="models to run"
    )
    parser.add_argument("--size", choices=SIZES, default=SMALL, help="size of the models")
    parser.add_argument(
        "--baselines",
        nargs="+",
        choices=BASELINES,
        default=BASELINES,
        help="what to time; ONNX Runtime is always checked",
    )
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each baseline")
    parser.add_argument("--bf16", action="store_true", help="run under autocast to bfloat16")
    return parser.parse_args()


class Runner:
    """Runs the steps of a module in one baseline."""

    def __init__(self, baseline: str, model: Model, module: nn.Module, batch: Any, precision: str) -> None:
        self.module, self._batch, self._model = module, batch, model
        self.backend = ORTBackend(ORTOptions.from_mapping({"precision": precision})) if baseline == ORT else None
        compiler = {INDUCTOR: "inductor", ORT: self.backend}.get(baseline)
        # A separate function for each runner, since Dynamo stores compiled graphs with the function's code.
        forward: Callable[..., Tensor] = lambda module, batch: model.loss(module(**batch))  # noqa: E731
        self._forward = forward if compiler is None else torch.compile(forward, backend=compiler)
        self._settings: Callable[[], AbstractContextManager[Any]] = nullcontext
        if baseline == ORT:
            self._settings = lambda: dynamo_settings("training_step", strict=False)
        self._low = precision == BF16_MIXED
        self._optimizer = torch.optim.AdamW(module.parameters(), 1e-4)

    def gradients(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and the gradients, without the optimizer's step. Steps that draw numbers draw the same ones."""
        torch.manual_seed(0)
        with self._settings(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=self._low):
            loss = self._forward(self.module, self._batch)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None}
        self._optimizer.zero_grad()
        return loss.detach(), gradients

    def step(self) -> float:
        """Runs a step and returns its time in milliseconds."""
        torch.cuda.synchronize(DEVICE)
        start = time.perf_counter()
        with self._settings(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=self._low):
            loss = self._forward(self.module, self._batch)
        loss.backward()
        if self._model.clip is not None:
            clip_grad_norm_(self.module.parameters(), self._model.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch.cuda.synchronize(DEVICE)
        return 1e3 * (time.perf_counter() - start)


def measure_model(model: Model, size: str, rounds: int, precision: str, baselines: Sequence[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    module, batch = model.make(size)
    module, batch = module.to(DEVICE).train(), tree_map(_to_device, batch)
    runners = {baseline: Runner(baseline, model, copy.deepcopy(module), batch, precision) for baseline in baselines}
    errors, fallbacks = _compared(model, module, batch, precision)
    times: dict[str, list[float]] = {baseline: [] for baseline in baselines}
    for runner in runners.values():
        for _ in range(WARMUP):
            runner.step()
    for _ in range(rounds):
        for baseline, runner in runners.items():
            times[baseline].append(runner.step())
    medians = {baseline: round(statistics.median(values), 3) for baseline, values in times.items()}
    return {"step_ms": medians, **errors, "fallbacks": fallbacks}


def _to_device(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def _compared(model: Model, module: nn.Module, batch: Any, precision: str) -> tuple[dict[str, float], list[str]]:
    """The relative errors of the loss and of all gradients together, compared with eager, without dropout.

    With the reasons of the graphs that fell back to eager PyTorch.
    """
    without_dropout = copy.deepcopy(module)
    set_dropout_to_zero(without_dropout)
    eager, ort = (
        Runner(baseline, model, copy.deepcopy(without_dropout), batch, precision) for baseline in (EAGER, ORT)
    )
    (expected, reference), (actual, gradients) = eager.gradients(), ort.gradients()
    difference = math.sqrt(sum(float((gradients[name] - g).double().square().sum()) for name, g in reference.items()))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in reference.values()))
    assert ort.backend is not None
    fallbacks = [graph.fallback for graph in ort.backend.compile_log.graphs if graph.fallback is not None]
    return {
        "loss_error": float((actual - expected).abs() / expected.abs().clamp_min(1e-12)),
        "gradient_error": difference / max(norm, 1e-12),
    }, fallbacks


def table(rows: list[tuple[str, dict[str, Any]]]) -> str:
    lines = [
        "| model | eager, ms | inductor, ms | ort, ms | gradient error | fallbacks |",
        "|---|---|---|---|---|---|",
    ]
    for name, figures in rows:
        times = " | ".join(str(figures["step_ms"].get(baseline, "")) for baseline in BASELINES)
        lines.append(f"| {name} | {times} | {figures['gradient_error']:.1e} | {len(figures['fallbacks'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
