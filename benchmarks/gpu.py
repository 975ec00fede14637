"""Training steps on a GPU: eager, inductor and ONNX Runtime with torch's CUDA kernels as its nodes.

    python -m benchmarks.gpu                          # the small models of benchmarks/models
    python -m benchmarks.gpu --models BERT --rounds 50 --bf16

Needs a GPU, torch with CUDA and stock onnxruntime (docs/engines.md). First it compares the first loss and its gradients
with eager's, dropout off. Then the ways take steps in turns (forward, backward, clipping, AdamW), each with a module of
its own; times are medians between synchronized ends. Prints a line of JSON for each model, and a table.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.models import MODELS
from benchmarks.models.case import SMALL, Model
from lit_ort import ORTOptions
from lit_ort._compat.torch_fx import tree_map
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.steps import dynamo_settings
from lit_ort.options import BF16_MIXED, FLOAT32

EAGER, INDUCTOR, ORT = WAYS = ("eager", "inductor", "ort")
WARMUP = 5
DEVICE = torch.device("cuda", 0)


def main() -> None:
    arguments = parse()
    if not torch.cuda.is_available():
        sys.exit(
            f"torch {torch.__version__} sees no GPU, and this measures one. On the CPU: python -m benchmarks.suite"
        )
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}")
    rows = []
    for name in arguments.models:
        found = measured(MODELS[name], arguments.rounds, BF16_MIXED if arguments.bf16 else FLOAT32)
        print(json.dumps({"model": name, **found}), flush=True)
        rows.append((name, found))
    print(table(rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--bf16", action="store_true", help="under autocast to bfloat16")
    return parser.parse_args()


class Way:
    """A module of its own and its compiled forward."""

    def __init__(self, way: str, model: Model, module: nn.Module, batch: Any, precision: str) -> None:
        self.module, self._batch, self._model = module, batch, model
        self.backend = ORTBackend(ORTOptions.from_mapping({"precision": precision})) if way == ORT else None
        compiler = {INDUCTOR: "inductor", ORT: self.backend}.get(way)
        # A function of its own: Dynamo keeps what it compiled with the function's code.
        forward: Callable[..., Tensor] = lambda module, batch: model.loss(module(**batch))  # noqa: E731
        self._forward = forward if compiler is None else torch.compile(forward, backend=compiler)
        self._settings: Callable[[], AbstractContextManager[Any]] = nullcontext
        if way == ORT:
            self._settings = lambda: dynamo_settings("training_step", strict=False)
        self._low = precision == BF16_MIXED
        self._optimizer = torch.optim.AdamW(module.parameters(), 1e-4)

    def gradients(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and every gradient of the next step, which is not taken."""
        with self._settings(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=self._low):
            loss = self._forward(self.module, self._batch)
        loss.backward()
        found = {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None}
        self._optimizer.zero_grad()
        return loss.detach(), found

    def step(self) -> float:
        """Milliseconds of a step."""
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


def measured(model: Model, rounds: int, precision: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module, batch = model.make(SMALL)
    module, batch = module.to(DEVICE).train(), tree_map(_there, batch)
    ways = {way: Way(way, model, copy.deepcopy(module), batch, precision) for way in WAYS}
    errors = _errors(model, module, batch, precision)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for one in ways.values():
        for _ in range(WARMUP):
            one.step()
    for _ in range(rounds):
        for way, one in ways.items():
            times[way].append(one.step())
    backend = ways[ORT].backend
    assert backend is not None
    fallbacks = [graph.fallback for graph in backend.compile_log.graphs if graph.fallback is not None]
    medians = {way: round(statistics.median(own), 3) for way, own in times.items()}
    return {"step_ms": medians, **errors, "fallbacks": fallbacks}


def _there(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def _errors(model: Model, module: nn.Module, batch: Any, precision: str) -> dict[str, float]:
    """Relative errors of the loss and of all gradients together, to eager's, dropout off."""
    plain = copy.deepcopy(module)
    for part in plain.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    (expected, reference), (actual, found) = (
        Way(way, model, copy.deepcopy(plain), batch, precision).gradients() for way in (EAGER, ORT)
    )
    difference = math.sqrt(sum(float((found[name] - g).double().square().sum()) for name, g in reference.items()))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in reference.values()))
    return {
        "loss_error": float((actual - expected).abs() / expected.abs().clamp_min(1e-12)),
        "gradient_error": difference / max(norm, 1e-12),
    }


def table(rows: list[tuple[str, dict[str, Any]]]) -> str:
    lines = [
        "| model | eager ms | ort / eager | ort / inductor | gradient error | eager graphs |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in rows:
        eager, inductor, ort = (found["step_ms"][way] for way in WAYS)
        lines.append(
            f"| {name} | {eager:.1f} | {ort / eager:.2f} | {ort / inductor:.2f} | {found['gradient_error']:.1e} | "
            f"{len(found['fallbacks'])} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
