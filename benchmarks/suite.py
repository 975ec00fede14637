"""Training steps of many architectures in eager, inductor and ONNX Runtime.

    python benchmarks/suite.py results.jsonl                     # all, small: an hour; goes on where it was stopped
    python benchmarks/suite.py results.jsonl --quick             # a model of each kind, in ten minutes
    python benchmarks/suite.py results.jsonl --models Llama ViT --sizes small medium --precisions 32-true bf16-mixed
    python benchmarks/suite.py results.jsonl --report            # the table and the picture of what is there

A step is forward, loss, backward, clipping where usual, and fused AdamW, dropout as configured. Each way to run it has
a process of its own, as for who uses it, and they take turns: as many steps as a quarter of a second holds, of which
the first, with the caches that the others left, is not counted. Medians. Each model adds a line of JSON.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import GROUPS, MODELS
from benchmarks.models.case import SIZES, SMALL
from benchmarks.suite_report import picture, summary, table
from lit_ort.benchmark.machine import machine, versions
from lit_ort.benchmark.result import BASELINES, ORT
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
    parser.add_argument("results", type=Path, help="a file of JSON lines, one for each model")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--sizes", nargs="+", default=[SMALL], choices=SIZES)
    parser.add_argument("--precisions", nargs="+", default=[FLOAT32], choices=(FLOAT32, BF16))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> None:
    """Adds a line for each model that has none yet."""
    done = {(line["model"], line["size"], line["precision"]) for line in read(arguments.results)}
    for name in chosen(arguments):
        for size in arguments.sizes:
            for precision in arguments.precisions:
                if (name, size, precision) not in done:
                    line = measured(name, size, precision, arguments.rounds)
                    with arguments.results.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    print(progress(line), file=sys.stderr, flush=True)


def chosen(arguments: argparse.Namespace) -> list[str]:
    if arguments.models:
        return arguments.models
    if arguments.quick:
        return list(QUICK)
    return [name for group in arguments.groups or GROUPS for name in GROUPS[group]]


def measured(name: str, size: str, precision: str, rounds: int) -> dict[str, Any]:
    """A model's line; one with an `error` where it could not be measured."""
    line: dict[str, Any] = {"model": name, "size": size, "precision": precision, "date": time.strftime("%Y-%m-%d")}
    try:
        figures = in_turns({b: Process.started(name, size, precision, b) for b in BASELINES}, rounds)
    except ProcessError as error:
        return {**line, "error": str(error)}
    return {**line, "machine": machine(), "versions": versions(), "figures": figures}


def in_turns(
    starting: Mapping[str, contextlib.AbstractContextManager[Process]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Figures of processes that take turns, by their names.

    Raises:
        ProcessError: one of them ended or took too long.
    """
    with contextlib.ExitStack() as stack:
        # One after the other: compiling takes all cores.
        processes = {name: stack.enter_context(start) for name, start in starting.items()}
        times = interleaved({name: process.step for name, process in processes.items()}, rounds)
        return {name: process.figures(times[name]) for name, process in processes.items()}


class ProcessError(Exception):
    """A process that ended or took too long."""


class Process:
    """One way to run a model's step, in a process of its own.

    Args:
        baseline: `eager`, `inductor` or `ort`.
        popen: the process.
        errors: what it writes to stderr.
    """

    def __init__(self, baseline: str, popen: subprocess.Popen[str], errors: IO[str]) -> None:
        self._baseline, self._popen, self._errors = baseline, popen, errors

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, name: str, size: str, precision: str, baseline: str, python: str = sys.executable
    ) -> Iterator[Process]:
        """A process that has taken its first steps.

        python: the interpreter of the environment to run in.
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
        """Takes its turn; how many seconds a step took."""
        return self._ask(STEP)

    def figures(self, seconds: list[float]) -> dict[str, Any]:
        return self._ask(seconds)

    def _ask(self, question: Any) -> Any:
        assert self._popen.stdin is not None
        try:
            print(json.dumps(question), file=self._popen.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
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
            raise self._ended()
        return json.loads(answer)

    def _ended(self) -> ProcessError:
        self._popen.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or [f"ended, or took longer than {SECONDS} s"])[-1]
        return ProcessError(f"{self._baseline}: {last[:300]}")


def alone(name: str, size: str, precision: str, baseline: str) -> None:
    """Measures a model in this process, and answers on stdout."""
    import torch
    import transformers

    from lit_ort import ORTOptions
    from lit_ort.benchmark.run import Measurement, gradients_in_eager
    from lit_ort.benchmark.steps import Workload

    answers, sys.stdout = sys.stdout, sys.stderr
    transformers.logging.set_verbosity_error()
    options = ORTOptions(precision=precision)
    # What every compilation imports and starts is no model's memory.
    Measurement(baseline, Workload(torch.nn.Linear(2, 2), torch.ones(1, 2), loss=torch.sum), options)
    torch.manual_seed(0)
    model = MODELS[name]
    module, batch = model.make(size)
    workload = Workload(module.train(), batch, model.clip, model.loss)
    measurement = Measurement(baseline, workload, options)
    print(json.dumps("ready"), file=answers, flush=True)
    for question in map(json.loads, sys.stdin):
        if question == STEP:
            answer = turn(measurement.step)
        else:
            # Inductor's gradients are not in question, and would take its compilation once more.
            expected = gradients_in_eager(workload, options) if baseline == ORT else None
            answer = dataclasses.asdict(measurement.figures(question, expected))
        print(json.dumps(answer), file=answers, flush=True)


def turn(step: Callable[[], float]) -> float:
    """Seconds of a step, the median of a turn."""
    taken = [step()]
    while sum(taken) < TURN_SECONDS:
        taken.append(step())
    return statistics.median(taken[1:] or taken)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def progress(line: dict[str, Any]) -> str:
    name = f"{line['model']}, {line['size']}, {line['precision']}"
    if "error" in line:
        return f"{name}: {line['error']}"
    medians = {kind: sorted(own["step_ms"])[len(own["step_ms"]) // 2] for kind, own in line["figures"].items()}
    return f"{name}: " + ", ".join(f"{kind} {median:.0f} ms" for kind, median in medians.items())


if __name__ == "__main__":
    main()
