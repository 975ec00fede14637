"""Measures inference at batch sizes 1 and 32: eager, inductor, torch's ONNX export, and lit_ort.export (float32, int8).

    python -m benchmarks.inference
    python -m benchmarks.inference --models BERT ViT --rounds 20

Each baseline has a separate process that uses all cores, and the processes take turns; those of ONNX models don't load
torch. Prints a line of JSON for each model and batch size, and a table of eager's medians and the others' ratios to
them.
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

EAGER, INDUCTOR, TORCH_ONNX, LIT_ORT, INT8 = BASELINES = ("eager", "inductor", "torch.onnx", "lit_ort.export", "int8")
MODELS = ("BERT", "GPT-2", "Llama", "ViT", "ResNet")
BATCHES = (1, 32)
WARM_UP, CALLS, PAUSE_S = 3, 3, 0.1
Call = Callable[[], Any]


def main() -> None:
    arguments = parse()
    for name in arguments.models:
        if name not in MODELS:
            raise SystemExit(f"error: --models {name} is not one of {', '.join(MODELS)}. Use one of them.")
    lines: list[dict[str, Any]] = []
    for name in arguments.models:
        for batch in arguments.batches:
            lines.append({"model": name, "batch": batch, **measure_model(name, batch, arguments.rounds)})
            print(json.dumps(lines[-1]), flush=True)
    print(table(lines))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="batch sizes")
    parser.add_argument("--rounds", type=int, default=15, help="timed turns of each baseline")
    return parser.parse_args()


def measure_model(name: str, batch: int, rounds: int) -> dict[str, Any]:
    """The median time of a call in each baseline, in milliseconds, and the errors of exported models."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        with context.Pool(1) as pool:
            errors = pool.apply(write_models, (name, batch, folder))
        workers = {b: stack.enter_context(_started(context, b, name, batch, folder)) for b in BASELINES}
        times: dict[str, list[float]] = {baseline: [] for baseline in BASELINES}
        for _ in range(rounds):
            for baseline, worker in workers.items():
                worker.send(True)
                times[baseline].append(worker.recv())
    medians = {baseline: round(statistics.median(values), 3) for baseline, values in times.items()}
    return {"ms": medians, "errors": errors}


@contextlib.contextmanager
def _started(context: Any, baseline: str, name: str, batch: int, folder: str) -> Iterator[Connection]:
    """A connection to a process that has warmed up; it answers each message with the time of a call in milliseconds."""
    parent, child = context.Pipe()
    process = context.Process(target=work, args=(child, baseline, name, batch, folder), daemon=True)
    process.start()
    child.close()
    try:
        parent.recv()
        yield parent
    finally:
        parent.close()
        process.join(10)
        process.kill()


def work(connection: Connection, baseline: str, name: str, batch: int, folder: str) -> None:
    """The main function of a baseline's process."""
    is_torch = baseline in (EAGER, INDUCTOR)
    call = torch_call(baseline, name, batch) if is_torch else onnx_call(Path(folder, f"{baseline}.onnx"))
    for _ in range(WARM_UP):
        call()
    connection.send(True)
    with contextlib.suppress(EOFError):
        while connection.recv():
            # Wait until the previous process's threads stop spinning; the extra call warms this process's caches.
            time.sleep(PAUSE_S)
            call()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            connection.send((time.perf_counter() - start) / CALLS * 1e3)


def torch_call(baseline: str, name: str, batch: int) -> Call:
    import torch

    warnings.simplefilter("ignore")
    module, inputs = _module_and_inputs(name, batch)
    function = torch.compile(module) if baseline == INDUCTOR else module

    def call() -> Any:
        with torch.inference_mode():
            return function(**inputs)

    return call


def onnx_call(path: Path) -> Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    with np.load(path.with_name("inputs.npz")) as arrays:
        inputs = {value.name: arrays[value.name] for value in session.get_inputs()}
    return lambda: session.run(None, inputs)


def write_models(name: str, batch: int, folder: str) -> dict[str, float | None]:
    """Writes the ONNX models and their inputs to a folder. Returns the exported models' largest errors to eager."""
    import torch

    import lit_ort

    warnings.simplefilter("ignore")
    module, inputs = _module_and_inputs(name, batch)
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
    settings = {"dynamic": {key: {0: "batch"} for key in inputs}, "input_names": list(inputs)}
    results = {
        baseline: lit_ort.export(
            module, Path(folder, f"{baseline}.onnx"), inputs, tolerance=1.0, quantize=quantize, **settings
        )
        for baseline, quantize in ((LIT_ORT, None), (INT8, "int8"))
    }
    return {baseline: result.error for baseline, result in results.items()}


def _module_and_inputs(name: str, batch: int) -> tuple[Any, dict[str, Any]]:
    """A model of the suite that returns its logits, and inputs of a batch size."""
    import torch
    from torch import nn

    from benchmarks import models

    class Logits(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            output = self.module(**inputs)
            return getattr(output, "logits", output)

    torch.manual_seed(0)
    module, training_batch = models.MODELS[name].make("small")
    tensors = {key: value for key, value in training_batch.items() if key not in ("labels", "targets", "y")}
    inputs = {key: torch.cat([value] * -(-batch // len(value)))[:batch].clone() for key, value in tensors.items()}
    return Logits(module).eval(), inputs


def table(lines: Sequence[dict[str, Any]]) -> str:
    from lit_ort.benchmark.machine import machine

    others = BASELINES[1:]
    rows = [
        f"| model | batch | eager, ms | {' | '.join(f'{name} / eager' for name in others)} | error | int8 error |",
        "|---|---|---|" + "---|" * (len(others) + 2),
    ]
    ratios = [[line["ms"][baseline] / line["ms"][EAGER] for baseline in others] for line in lines]
    for line, row in zip(lines, ratios, strict=True):
        errors = " | ".join(f"{line['errors'][baseline]:.0e}" for baseline in (LIT_ORT, INT8))
        figures = " | ".join(f"{ratio:.2f}" for ratio in row)
        rows.append(f"| {line['model']} | {line['batch']} | {line['ms'][EAGER]:.2f} | {figures} | {errors} |")
    means = " | ".join(f"{statistics.geometric_mean(column):.2f}" for column in zip(*ratios, strict=True))
    return "\n".join([*rows, f"| geometric mean | | | {means} | | |", "", f"{machine()}."])


if __name__ == "__main__":
    main()
