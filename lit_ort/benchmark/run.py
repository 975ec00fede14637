"""Measures a step: memory and first steps one baseline after the other, then times interleaved, then errors."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    measured = {name: Measurement(name, workload, options) for name in baselines}
    times = interleaved({name: one.step for name, one in measured.items()}, rounds)
    expected = gradients_in_eager(workload, options)
    notes = () if expected is not None else ("Errors are not measured: the step draws random numbers of its own.",)
    figures = {name: one.figures(times[name], expected) for name, one in measured.items()}
    step = f"{type(module).__name__}, {options.precision}, medians of {rounds} rounds"
    return Benchmark(step, machine(), versions(), figures, notes)


def _require(rounds: int, baselines: Sequence[str]) -> None:
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown or not baselines:
        raise OptionsError(f"baselines={list(baselines)}: choose from {', '.join(BASELINES)}.")
    if rounds < 1:
        raise OptionsError(f"rounds={rounds}: at least one step has to be timed.")


class Measurement:
    """A baseline after its first steps, whose time and memory it knows.

    Args:
        baseline: `eager`, `inductor` or `ort`.
        workload: what to run; of a module that stays as it is.
        options: of ONNX Runtime; its precision is that of every baseline.
    """

    def __init__(self, baseline: str, workload: Workload, options: ORTOptions) -> None:
        self._baseline, self._workload, self._options = baseline, workload, options
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
        """Takes a step; how many seconds that took."""
        return _timed(self._runner.step)

    def _first_step_from_cache(self) -> float:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            options = dataclasses.replace(self._options, cache_dir=folder)
            runners = [
                Runner(ORT, self._workload.copy(), _is_low(options), ORTBackend(options, "step")) for _ in range(2)
            ]
            return [_timed(runner.step) for runner in runners][-1]

    def figures(self, seconds: Sequence[float], expected: Gradients | None) -> BaselineFigures:
        """All that is known of it.

        Args:
            seconds: of its steps.
            expected: eager's loss and gradients, to compare its own with; None where they are not compared.
        """
        error = None if expected is None or self._baseline == EAGER else self._error(expected)
        ran, fallbacks = "", tuple[str, ...]()
        if self._runner.backend is not None:
            explanation = explain(self._runner.backend)
            ran = explanation.summary
            fallbacks = tuple(dict.fromkeys(graph.fallback for graph in explanation.fallbacks if graph.fallback))
        return BaselineFigures(
            tuple(1e3 * second for second in seconds), self._first, self._cached, self._peak, error, ran, fallbacks
        )

    def _error(self, expected: Gradients) -> float:
        """The largest relative error of its loss and gradients, with dropout off."""
        backend = ORTBackend(self._options, "step") if self._baseline == ORT else None
        with _quiet():
            runner = Runner(self._baseline, without_dropout(self._workload), _is_low(self._options), backend)
            return _error(_gradients(runner, seed=0), expected)


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


def interleaved(steps: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each baseline's steps; another one begins in each round, so that none always follows the same."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for k in range(rounds):
        for name in [*names[k % len(names) :], *names[: k % len(names)]]:
            times[name].append(steps[name]())
    return times


def gradients_in_eager(workload: Workload, options: ORTOptions) -> Gradients | None:
    """Loss and gradients with dropout off; None where they change from run to run."""
    reference = Runner(EAGER, without_dropout(workload), _is_low(options), None)
    expected = _gradients(reference, seed=0)
    return expected if _is_same(expected, _gradients(reference, seed=1)) else None


def _gradients(runner: Runner, seed: int) -> Gradients:
    torch.manual_seed(seed)
    state = {name: value.clone() for name, value in runner.workload.module.state_dict().items()}
    loss = runner.gradients()
    # Such as running means, which a second forward would find changed.
    runner.workload.module.load_state_dict(state)
    found = {name: p.grad for name, p in runner.workload.module.named_parameters() if p.grad is not None}
    return {"loss": loss, **{name: gradient.clone() for name, gradient in found.items()}}


def _is_same(one: Gradients, other: Gradients) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6, equal_nan=True) for name in one)


def _error(found: Gradients, expected: Gradients) -> float:
    # What is zero but for rounding has no direction to compare.
    floor = 1e-2 * max(float(value.norm()) for value in expected.values())
    pairs = [(found.get(name, torch.zeros_like(value)), value) for name, value in expected.items()]
    return max(float((own - value).norm()) / max(float(value.norm()), floor) for own, value in pairs)
