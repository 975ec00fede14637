"""Latency at batch 1 and 32: eager, inductor, torch's own ONNX export and lit_ort.export in float32 and int8.

    python -m benchmarks.inference
    python -m benchmarks.inference --models BERT ViT --rounds 20

Each way has a process of its own, with all cores, and the processes take turns; those of ONNX models don't load torch.
Prints a line of JSON for each model and batch, and a table of eager's medians and of the others' ratios to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

EAGER, INDUCTOR, TORCH_ONNX, OURS, INT8 = WAYS = ("eager", "inductor", "torch.onnx", "lit_ort.export", "int8")
MODELS = ("BERT", "GPT-2", "Llama", "ViT", "ResNet")
BATCHES = (1, 32)
WARM_UP, CALLS, PAUSE_S = 3, 3, 0.1
Call = Callable[[], Any]


def main() -> None:
    arguments = parse()
    for name in arguments.models:
        if name not in MODELS:
            raise SystemExit(f"error: --models {name}: is none of {', '.join(MODELS)}.")
    lines: list[dict[str, Any]] = []
    for name in arguments.models:
        for batch in arguments.batches:
            lines.append({"model": name, "batch": batch, **measured(name, batch, arguments.rounds)})
            print(json.dumps(lines[-1]), flush=True)
    print(table(lines))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def measured(name: str, batch: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds by way, and the errors of the exported forms to eager."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        with context.Pool(1) as pool:
            errors = pool.apply(write_models, (name, batch, folder))
        workers = {way: stack.enter_context(_started(context, way, name, batch, folder)) for way in WAYS}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, worker in workers.items():
                worker.send(True)
                times[way].append(worker.recv())
    return {"ms": {way: round(statistics.median(found), 3) for way, found in times.items()}, "errors": errors}


@contextlib.contextmanager
def _started(context: Any, way: str, name: str, batch: int, folder: str) -> Iterator[Connection]:
    """The end of a pipe to a process that is warm and answers each message with a call's milliseconds."""
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, way, name, batch, folder), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield ours
    finally:
        ours.close()
        process.join(10)
        process.kill()


def work(connection: Connection, way: str, name: str, batch: int, folder: str) -> None:
    call = torch_call(way, name, batch) if way in (EAGER, INDUCTOR) else onnx_call(Path(folder, f"{way}.onnx"))
    for _ in range(WARM_UP):
        call()
    connection.send(True)
    with contextlib.suppress(EOFError):
        while connection.recv():
            # Threads of the process before spin for a while, and this one's caches are cold.
            time.sleep(PAUSE_S)
            call()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            connection.send((time.perf_counter() - start) / CALLS * 1e3)


def torch_call(way: str, name: str, batch: int) -> Call:
    import torch

    warnings.simplefilter("ignore")
    module, inputs = _made(name, batch)
    called = torch.compile(module) if way == INDUCTOR else module

    def call() -> Any:
        with torch.inference_mode():
            return called(**inputs)

    return call


def onnx_call(path: Path) -> Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    with np.load(path.with_name("inputs.npz")) as found:
        inputs = {value.name: found[value.name] for value in session.get_inputs()}
    return lambda: session.run(None, inputs)


def write_models(name: str, batch: int, folder: str) -> dict[str, float | None]:
    """Leaves the models and their inputs in a folder. Returns the exported forms' largest errors to eager."""
    import torch

    import lit_ort

    warnings.simplefilter("ignore")
    module, inputs = _made(name, batch)
    np.savez(Path(folder, "inputs.npz"), **{key: value.numpy() for key, value in inputs.items()})
    torch.onnx.export(
        module,
        (),
        str(Path(folder, f"{TORCH_ONNX}.onnx")),
        kwargs=inputs,
        input_names=list(inputs),
        dynamo=True,
        verbose=False,
    )
    form = {"dynamic": {key: {0: "batch"} for key in inputs}, "input_names": list(inputs)}
    found = {
        way: lit_ort.export(module, Path(folder, f"{way}.onnx"), inputs, tolerance=1.0, quantize=quantized, **form)
        for way, quantized in ((OURS, None), (INT8, "int8"))
    }
    return {way: exported.error for way, exported in found.items()}


def _made(name: str, batch: int) -> tuple[Any, dict[str, Any]]:
    """A model of the suite that returns its logits, and inputs of so many items."""
    import torch
    from torch import nn

    from benchmarks import models

    class Logits(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            found = self.module(**inputs)
            return getattr(found, "logits", found)

    torch.manual_seed(0)
    module, given = models.MODELS[name].make("small")
    tensors = {key: value for key, value in given.items() if key not in ("labels", "targets", "y")}
    inputs = {key: torch.cat([value] * -(-batch // len(value)))[:batch].clone() for key, value in tensors.items()}
    return Logits(module).eval(), inputs


def table(lines: Sequence[dict[str, Any]]) -> str:
    from lit_ort.benchmark.machine import machine

    others = WAYS[1:]
    rows = [
        f"| model | batch | eager ms | {' | '.join(others)} | error | int8 error |",
        "|---|---|---|" + "---|" * (len(others) + 2),
    ]
    ratios = [[line["ms"][way] / line["ms"][EAGER] for way in others] for line in lines]
    for line, own in zip(lines, ratios, strict=True):
        errors = " | ".join(f"{line['errors'][way]:.0e}" for way in (OURS, INT8))
        figures = " | ".join(f"{ratio:.2f}" for ratio in own)
        rows.append(f"| {line['model']} | {line['batch']} | {line['ms'][EAGER]:.2f} | {figures} | {errors} |")
    means = " | ".join(f"{statistics.geometric_mean(column):.2f}" for column in zip(*ratios, strict=True))
    return "\n".join([*rows, f"| geometric mean | | | {means} | | |", "", f"{machine()}."])


if __name__ == "__main__":
    main()
