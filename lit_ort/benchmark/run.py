"""Measures a step: memory and first steps one baseline after the other, then times interleaved, then errors."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lit_ort._compat.torch_dynamo import fresh_inductor
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.inspect import explain
from lit_ort.benchmark.machine import machine, versions
from lit_ort.benchmark.memory import peak_mb
from lit_ort.benchmark.result import BASELINES, EAGER, INDUCTOR, ORT, BaselineFigures, Benchmark
from lit_ort.benchmark.steps import Runner, Workload, without_dropout
from lit_ort.errors import LitOrtWarning, OptionsError
from lit_ort.options import BF16_MIXED, ORTOptions

WARM_UP = 3


def benchmark(
    module: nn.Module,
    batch: Any,
    *,
    rounds: int = 10,
    baselines: Sequence[str] = BASELINES,
    options: ORTOptions | None = None,
    clip: float | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Benchmark:
    """Measures a training step in eager, inductor and ONNX Runtime on this machine.

    A step is forward, loss, backward, clipping and the optimizer: the first one that a LightningModule configures, else
    fused AdamW. Each baseline trains a copy of the module; the module itself is left as it is.

    Args:
        module: a LightningModule, whose `training_step` is taken, or a module that returns its loss.
        batch: of `training_step`; for other modules keyword arguments, a tuple of arguments, or the only argument.
        rounds: timed steps of each baseline, taken in turn.
        baselines: which of `eager`, `inductor` and `ort`.
        options: of ONNX Runtime; `precision="bf16-mixed"` puts the others under autocast.
        clip: the largest norm of the gradients.
        loss: from the output of a module that is no LightningModule to a scalar.

    Raises:
        OptionsError: an unknown baseline, fewer than one round, a step without a loss, or nothing that learns.
    """
    _require(rounds, baselines)
    options = ORTOptions() if options is None else options
    workload = Workload(module, batch, clip, loss)
    measured = {name: _Measured(name, workload, options) for name in baselines}
    times = _interleaved({name: one.runner for name, one in measured.items()}, rounds)
    errors, notes = _errors(workload, options, [name for name in baselines if name != EAGER])
    figures = {name: one.figures(times[name], errors.get(name)) for name, one in measured.items()}
    step = f"{type(module).__name__}, {options.precision}, medians of {rounds} rounds"
    return Benchmark(step, machine(), versions(), figures, notes)


def _require(rounds: int, baselines: Sequence[str]) -> None:
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown or not baselines:
        raise OptionsError(f"baselines={list(baselines)}: choose from {', '.join(BASELINES)}.")
    if rounds < 1:
        raise OptionsError(f"rounds={rounds}: at least one step has to be timed.")


class _Measured:
    """A baseline after its first steps."""

    def __init__(self, baseline: str, workload: Workload, options: ORTOptions) -> None:
        self._baseline, self._workload, self._options = baseline, workload, options
        self._first = 0.0
        self._peak = peak_mb(self._first_steps)
        self._cached = self._first_step_from_cache() if baseline == ORT else None

    def _first_steps(self) -> None:
        backend = ORTBackend(self._options, "step") if self._baseline == ORT else None
        self.runner = Runner(self._baseline, self._workload.copy(), _is_low(self._options), backend)
        with fresh_inductor() if self._baseline == INDUCTOR else nullcontext(), _quiet():
            self._first = _timed(self.runner.step)
            for _ in range(WARM_UP - 1):
                self.runner.step()

    def _first_step_from_cache(self) -> float:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            options = dataclasses.replace(self._options, cache_dir=folder)
            runners = [
                Runner(ORT, self._workload.copy(), _is_low(options), ORTBackend(options, "step")) for _ in range(2)
            ]
            return [_timed(runner.step) for runner in runners][-1]

    def figures(self, seconds: Sequence[float], error: float | None) -> BaselineFigures:
        ran, fallbacks = "", tuple[str, ...]()
        if self.runner.backend is not None:
            explanation = explain(self.runner.backend)
            ran = explanation.summary
            fallbacks = tuple(dict.fromkeys(graph.fallback for graph in explanation.fallbacks if graph.fallback))
        return BaselineFigures(
            tuple(1e3 * second for second in seconds), self._first, self._cached, self._peak, error, ran, fallbacks
        )


def _is_low(options: ORTOptions) -> bool:
    return options.precision == BF16_MIXED


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of fallbacks, which are in the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LitOrtWarning)
        yield


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _interleaved(runners: dict[str, Runner], rounds: int) -> dict[str, list[float]]:
    """Seconds of each baseline's steps; another one begins in each round, so that none always follows the same."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for k in range(rounds):
        for name in [*names[k % len(names) :], *names[: k % len(names)]]:
            times[name].append(_timed(runners[name].step))
    return times


def _errors(
    workload: Workload, options: ORTOptions, baselines: Sequence[str]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The largest relative error of each baseline's loss and gradients, with dropout off."""
    plain = without_dropout(workload)
    reference = Runner(EAGER, plain, _is_low(options), None)
    expected = _gradients(reference, seed=0)
    if not _is_same(expected, _gradients(reference, seed=1)):
        return {}, ("Errors are not measured: the step draws random numbers of its own.",)
    errors: dict[str, float] = {}
    with _quiet():
        for name in baselines:
            backend = ORTBackend(options, "step") if name == ORT else None
            runner = Runner(name, without_dropout(workload), _is_low(options), backend)
            errors[name] = _error(_gradients(runner, seed=0), expected)
    return errors, ()


def _gradients(runner: Runner, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    state = {name: value.clone() for name, value in runner.workload.module.state_dict().items()}
    loss = runner.gradients()
    # Such as running means, which a second forward would find changed.
    runner.workload.module.load_state_dict(state)
    found = {name: p.grad for name, p in runner.workload.module.named_parameters() if p.grad is not None}
    return {"loss": loss, **{name: gradient.clone() for name, gradient in found.items()}}


def _is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6, equal_nan=True) for name in one)


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    # What is zero but for rounding has no direction to compare.
    floor = 1e-2 * max(float(value.norm()) for value in expected.values())
    pairs = [(found.get(name, torch.zeros_like(value)), value) for name, value in expected.items()]
    return max(float((own - value).norm()) / max(float(value.norm()), floor) for own, value in pairs)
