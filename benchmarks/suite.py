"""Measures training steps of many architectures in eager, inductor and ONNX Runtime.

    python benchmarks/suite.py results.jsonl                     # all small models, an hour; continues where it stopped
    python benchmarks/suite.py results.jsonl --quick             # one model of each kind, in ten minutes
    python benchmarks/suite.py results.jsonl --models Llama ViT --sizes small medium --precisions 32-true bf16-mixed
    python benchmarks/suite.py results.jsonl --baselines eager ort  # in half of the time
    python benchmarks/suite.py results.jsonl --report            # the tables and the picture of the measurements so far

A step consists of forward, loss, backward, clipping where it is usual, and fused AdamW, with dropout as configured.
Each baseline runs in a separate process, and the processes take turns. In a turn, a process runs steps for a quarter of
a second; the first step is not counted, since the other processes have replaced the contents of the caches. Results are
medians. A line of JSON is added for each model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import GROUPS, MODELS
from benchmarks.models.case import SIZES, SMALL
from benchmarks.suite_report import picture, summary, table
from lit_ort.benchmark.machine import machine, versions
from lit_ort.benchmark.result import BASELINES, EAGER, ORT
from lit_ort.benchmark.run import interleaved

FLOAT32, BF16 = "32-true", "bf16-mixed"
QUICK = ("BERT", "Llama", "T5", "ViT", "ResNet", "MLP", "graph network")
SECONDS = 1800
STEP = "step"
TURN_SECONDS = 0.25


def main() -> None:
    arguments = parse()
    if arguments.alone:
        alone(*arguments.alone)
        return
    if not arguments.report:
        measure(arguments)
    results = read(arguments.results)
    print(f"{table(results)}\n\n{summary(results)}")
    image = arguments.results.with_suffix(".png")
    picture(results, image)
    print(f"\n{image}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file with a line of JSON for each model")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--sizes", nargs="+", default=[SMALL], choices=SIZES, help="sizes of the models")
    parser.add_argument("--precisions", nargs="+", default=[FLOAT32], choices=(FLOAT32, BF16), help="precisions")
    baselines = parser.add_argument(
        "--baselines", nargs="+", default=list(BASELINES), choices=BASELINES, help="of steps"
    )
    parser.add_argument("--rounds", type=int, default=12, help="timed turns of each baseline")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--report", action="store_true", help="measure nothing, only print the tables")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not {EAGER, ORT} <= {*arguments.baselines}:
        parser.error(str(argparse.ArgumentError(baselines, f"{EAGER} and {ORT} are compared, so both are needed")))
    return arguments


def measure(arguments: argparse.Namespace) -> None:
    """Measures each model that has no line yet, and adds its line."""
    measured = {(line["model"], line["size"], line["precision"]) for line in read(arguments.results)}
    for name in model_names(arguments):
        for size in arguments.sizes:
            for precision in arguments.precisions:
                if (name, size, precision) not in measured:
                    line = measure_model(name, size, precision, arguments.rounds, arguments.baselines)
                    with arguments.results.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    print(progress(line), file=sys.stderr, flush=True)


def model_names(arguments: argparse.Namespace) -> list[str]:
    if arguments.models:
        return arguments.models
    if arguments.quick:
        return list(QUICK)
    return [name for group in arguments.groups or GROUPS for name in GROUPS[group]]


def measure_model(
    name: str, size: str, precision: str, rounds: int, baselines: Sequence[str] = BASELINES
) -> dict[str, Any]:
    """The line of a model; it has an `error` if the model could not be measured."""
    line: dict[str, Any] = {"model": name, "size": size, "precision": precision, "date": time.strftime("%Y-%m-%d")}
    try:
        figures = in_turns({b: Process.started(name, size, precision, b) for b in baselines}, rounds)
    except ProcessError as error:
        return {**line, "error": str(error)}
    return {**line, "machine": machine(), "versions": versions(), "figures": figures}


def in_turns(
    contexts: Mapping[str, contextlib.AbstractContextManager[Process]], rounds: int
) -> dict[str, dict[str, Any]]:
    """The figures of processes that take turns, by name.

    Raises:
        ProcessError: a process ended or took too long.
    """
    with contextlib.ExitStack() as stack:
        # Processes start one after the other, since compilation uses all cores.
        processes = {name: stack.enter_context(context) for name, context in contexts.items()}
        times = interleaved({name: process.step for name, process in processes.items()}, rounds)
        return {name: process.figures(times[name]) for name, process in processes.items()}


class ProcessError(Exception):
    """A process that ended or took too long."""


class Process:
    """A separate process that runs a model's step in one baseline.

    Args:
        baseline: `eager`, `inductor` or `ort`.
        popen: the process.
        errors: the file of its stderr.
    """

    def __init__(self, baseline: str, popen: subprocess.Popen[str], errors: IO[str]) -> None:
        self._baseline, self._popen, self._errors = baseline, popen, errors

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, name: str, size: str, precision: str, baseline: str, python: str = sys.executable
    ) -> Iterator[Process]:
        """Starts a process and yields it after its first steps.

        Args:
            name: the name of the model.
            size, precision: of the model.
            baseline: `eager`, `inductor` or `ort`.
            python: the Python interpreter to use.
        """
        command = [python, "-W", "ignore", __file__, "-", "--alone", name, size, precision, baseline]
        with tempfile.TemporaryFile("w+") as errors:
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as popen:
                try:
                    process = cls(baseline, popen, errors)
                    process._answer()
                    yield process
                finally:
                    popen.kill()

    def step(self) -> float:
        """Runs a turn and returns the time of a step in seconds."""
        return self._request(STEP)

    def figures(self, seconds: list[float]) -> dict[str, Any]:
        return self._request(seconds)

    def _request(self, request: Any) -> Any:
        assert self._popen.stdin is not None
        try:
            print(json.dumps(request), file=self._popen.stdin, flush=True)
        except BrokenPipeError:
            raise self._error() from None
        return self._answer()

    def _answer(self) -> Any:
        assert self._popen.stdout is not None
        limit = threading.Timer(SECONDS, self._popen.kill)
        limit.start()
        try:
            answer = self._popen.stdout.readline()
        finally:
            limit.cancel()
        if not answer:
            raise self._error()
        return json.loads(answer)

    def _error(self) -> ProcessError:
        self._popen.wait()
        self._errors.seek(0)
        last_line = (self._errors.read().strip().splitlines() or [f"ended, or took longer than {SECONDS} s"])[-1]
        return ProcessError(f"{self._baseline}: {last_line[:300]}")


def alone(name: str, size: str, precision: str, baseline: str) -> None:
    """Measures a model in this process; reads requests from stdin and answers on stdout."""
    import torch
    import transformers

    from lit_ort import ORTOptions
    from lit_ort.benchmark.run import Measurement, gradients_in_eager
    from lit_ort.benchmark.training_step import Workload

    answers, sys.stdout = sys.stdout, sys.stderr
    transformers.logging.set_verbosity_error()
    options = ORTOptions.from_mapping({"precision": precision})
    # The first compilation loads libraries and starts threads, whose memory is not the model's.
    layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    Measurement(baseline, Workload(layers, torch.ones(256, 64), loss=torch.mean), options)
    torch.manual_seed(0)
    model = MODELS[name]
    module, batch = model.make(size)
    workload = Workload(module.train(), batch, model.clip, model.loss)
    measurement = Measurement(baseline, workload, options)
    print(json.dumps("ready"), file=answers, flush=True)
    for request in map(json.loads, sys.stdin):
        if request == STEP:
            answer = turn(measurement.step)
        else:
            # Inductor's gradients are not compared: that would need another compilation.
            expected = gradients_in_eager(workload, options)[0] if baseline == ORT else None
            answer = dataclasses.asdict(measurement.figures(request, expected))
        print(json.dumps(answer), file=answers, flush=True)


def turn(step: Callable[[], float]) -> float:
    """The median time of a step in a turn, in seconds."""
    seconds = [step()]
    while sum(seconds) < TURN_SECONDS:
        seconds.append(step())
    return statistics.median(seconds[1:] or seconds)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def progress(line: dict[str, Any]) -> str:
    name = f"{line['model']}, {line['size']}, {line['precision']}"
    if "error" in line:
        return f"{name}: {line['error']}"
    times = {baseline: sorted(figures["step_ms"]) for baseline, figures in line["figures"].items()}
    medians = {baseline: values[len(values) // 2] for baseline, values in times.items()}
    return f"{name}: " + ", ".join(f"{baseline} {median:.0f} ms" for baseline, median in medians.items())


if __name__ == "__main__":
    main()
