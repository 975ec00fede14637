"""Measures a step: memory and first steps of each baseline in turn, then step times interleaved, then errors."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lit_ort._compat.torch_dynamo import fresh_inductor
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.explanation import explain
from lit_ort.benchmark.machine import busy, machine, versions
from lit_ort.benchmark.peak_memory import peak_mb
from lit_ort.benchmark.result import BASELINES, EAGER, INDUCTOR, ORT, BaselineFigures, Benchmark
from lit_ort.benchmark.training_step import Runner, Workload, without_dropout
from lit_ort.errors import LitOrtWarning, OptionsError
from lit_ort.options import BF16_MIXED, ORTOptions

WARM_UP = 3
# The loss and each parameter's gradient, by name.
Gradients = dict[str, Tensor]


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

    A step consists of forward, loss, backward, clipping and the optimizer's step. The optimizer is the first one that a
    LightningModule configures, otherwise fused AdamW. Each baseline trains a copy of the module; the module itself and
    torch's random generator are not changed.

    Args:
        module: a LightningModule, whose `training_step` is used, or a module that returns its loss.
        batch: the batch of `training_step`; for other modules keyword arguments, a tuple of arguments, or the only
            argument.
        rounds: the number of timed steps of each baseline; baselines run in turn.
        baselines: one or more of `eager`, `inductor` and `ort`.
        options: the options of `ort`; with `precision="bf16-mixed"`, the other baselines run under autocast. A
            `cache_dir` is not used: the first step is one with compilation.
        clip: the maximum norm of the gradients, or None.
        loss: a function from the module's output to a scalar loss, for a module that is not a LightningModule.

    Raises:
        OptionsError: an unknown baseline, fewer than one round, a step without a loss, or no trainable parameter.
    """
    _require(rounds, baselines)
    options = ORTOptions() if options is None else options
    workload, load = Workload(module, batch, clip, loss), busy()
    with torch.random.fork_rng(devices=[]):
        measurements = {name: Measurement(name, workload, options) for name in baselines}
        times = interleaved({name: measurement.step for name, measurement in measurements.items()}, rounds)
        expected, draws = gradients_in_eager(workload, options)
        incomparable = {INDUCTOR} if draws else set[str]()
        errors = _OTHER_DRAWS if incomparable & set(baselines) else ""
        figures = {
            name: measurement.figures(times[name], None if name in incomparable else expected)
            for name, measurement in measurements.items()
        }
    for measurement in measurements.values():
        measurement.close()
    step = f"{type(module).__name__}, {options.precision}, medians of {rounds} rounds"
    return Benchmark(step, machine(), versions(), figures, tuple(note for note in (errors, load) if note))


_OTHER_DRAWS = "Inductor's error is not measured: besides dropout the step draws random numbers, and inductor others."


def _require(rounds: int, baselines: Sequence[str]) -> None:
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown or not baselines:
        raise OptionsError(
            f"baselines={list(baselines)} must be one or more of {', '.join(BASELINES)}. Use those names."
        )
    if rounds < 1:
        raise OptionsError(f"rounds={rounds} must be at least 1. Use 10 or more for stable medians.")


class Measurement:
    """A baseline with the time and memory of its first steps, which run on creation.

    Args:
        baseline: `eager`, `inductor` or `ort`.
        workload: the step; its module is copied and not changed.
        options: the options of `ort`; its precision is used for every baseline.
    """

    def __init__(self, baseline: str, workload: Workload, options: ORTOptions) -> None:
        self._baseline, self._workload = baseline, workload
        options = dataclasses.replace(options, cache_dir=None)
        # Files of graphs are those of the steps that are timed.
        self._options = dataclasses.replace(options, dump_dir=None)
        self._first = 0.0
        backend = ORTBackend(options, "step") if baseline == ORT else None
        self._runner = Runner(baseline, workload.copy(), _is_low(options), backend)
        self._peak = peak_mb(self._first_steps)
        self._cached = self._first_step_from_cache() if baseline == ORT else None

    def _first_steps(self) -> None:
        with fresh_inductor() if self._baseline == INDUCTOR else nullcontext(), _quiet():
            self._first = self.step()
            for _ in range(WARM_UP - 1):
                self.step()

    def step(self) -> float:
        """Runs one step and returns its time in seconds."""
        return _timed(self._runner.step)

    def close(self) -> None:
        """Drops what was compiled."""
        self._runner.close()

    def _first_step_from_cache(self) -> float:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            options = dataclasses.replace(self._options, cache_dir=folder)
            runners = [
                Runner(ORT, self._workload.copy(), _is_low(options), ORTBackend(options, "step")) for _ in range(2)
            ]
            seconds = [_timed(runner.step) for runner in runners]
            for runner in runners:
                runner.close()
            return seconds[-1]

    def figures(self, seconds: Sequence[float], expected: Gradients | None) -> BaselineFigures:
        """The figures of the baseline.

        Args:
            seconds: the times of its steps.
            expected: eager's loss and gradients for comparison, or None.
        """
        error = None if expected is None or self._baseline == EAGER else self._error(expected)
        summary, fallbacks = "", tuple[str, ...]()
        if self._runner.backend is not None:
            explanation = explain(self._runner.backend)
            summary = explanation.summary
            reasons = [graph.fallback for graph in explanation.fallbacks if graph.fallback]
            fallbacks = tuple(dict.fromkeys([*reasons, *map(str, explanation.eager_functions)]))
        return BaselineFigures(
            tuple(1e3 * second for second in seconds), self._first, self._cached, self._peak, error, summary, fallbacks
        )

    def _error(self, expected: Gradients) -> float:
        """The largest relative error of its loss and gradients, without dropout."""
        backend = ORTBackend(self._options, "step") if self._baseline == ORT else None
        with _quiet():
            runner = Runner(self._baseline, without_dropout(self._workload), _is_low(self._options), backend)
            error = largest_error(_gradients(runner, seed=0), expected)
            runner.close()
            return error


def _is_low(options: ORTOptions) -> bool:
    return options.precision == BF16_MIXED


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignores warnings of fallbacks, which the table shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LitOrtWarning)
        yield


def _timed(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def interleaved(steps: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The times of each baseline's steps, in seconds.

    Each round starts with another baseline.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for k in range(rounds):
        for name in [*names[k % len(names) :], *names[: k % len(names)]]:
            times[name].append(steps[name]())
    return times


def gradients_in_eager(workload: Workload, options: ORTOptions) -> tuple[Gradients, bool]:
    """Loss and gradients without dropout, and whether they depend on the seed still."""
    reference = Runner(EAGER, without_dropout(workload), _is_low(options), None)
    expected = _gradients(reference, seed=0)
    return expected, not _is_same(expected, _gradients(reference, seed=1))


def _gradients(runner: Runner, seed: int) -> Gradients:
    torch.manual_seed(seed)
    # The forward changes buffers such as running means.
    buffers = [(buffer, buffer.clone()) for buffer in runner.workload.module.buffers()]
    loss = runner.gradients()
    for buffer, value in buffers:
        buffer.copy_(value)
    gradients = {name: p.grad for name, p in runner.workload.module.named_parameters() if p.grad is not None}
    # Sparse gradients have no comparison.
    return {"loss": loss, **{name: gradient.clone().to_dense() for name, gradient in gradients.items()}}


def _is_same(first: Gradients, second: Gradients) -> bool:
    return all(torch.allclose(first[name], second[name], rtol=1e-4, atol=1e-6, equal_nan=True) for name in first)


def largest_error(actual: Gradients, expected: Gradients) -> float:
    """The largest relative error of a loss and gradients, in the 2-norm; a missing gradient counts as zeros."""
    # A gradient that is zero up to rounding would have an arbitrary relative error.
    floor = 1e-2 * max(float(value.norm()) for value in expected.values())
    pairs = [(actual.get(name, torch.zeros_like(value)), value) for name, value in expected.items()]
    errors = [_error(value - reference, max(float(reference.norm()), floor)) for value, reference in pairs]
    # `max` leaves out NaN.
    return max(math.inf if math.isnan(error) else error for error in errors)


def _error(difference: Tensor, norm: float) -> float:
    error = float(difference.norm())
    # Loss and gradients can all be zero, such as those of a hinge loss.
    return error / norm if norm else math.inf if error else 0.0
