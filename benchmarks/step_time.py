"""Times complete training steps of several baselines, interleaved in one process; shows medians and their ratios.

    python benchmarks/step_time.py --workload transformer_lm --rounds 20

Prints a table, then one line of JSON with versions and configuration. Memory and the time of the first step are
measured in a separate process for each baseline; `ort`'s first step is measured a second time with its graph in the
cache.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import BASELINES, CLIP, WORKLOADS, Baseline, Workload
from lit_ort import ORTBackend, ORTOptions
from lit_ort.benchmark.machine import machine
from lit_ort.callbacks import peak_rss_bytes

WARM_UP = 3
STEP = "step_ms"
# Figures of separate processes, and their decimals in the table.
SEPARATE_FIGURES = {"first_step_seconds": 1, "cached_first_step_seconds": 1, "peak_megabytes": 0}
STEPS_FOR_MEMORY = 5
OPTIMIZER = {None: "no optimizer", 0: "Adam (fused), no clip", CLIP: f"Adam (fused), clip {CLIP}"}
PACKAGES = ("torch", "onnxruntime-training-cpu", "lightning", "onnx")


def main() -> None:
    arguments = parse()
    workload = WORKLOADS[arguments.workload](**dict(arguments.shape))
    if arguments.alone:
        print(json.dumps(alone(arguments.alone, workload, arguments.cache_dir, clip_of(arguments))))
        return
    separate = {b: {} if arguments.times_only else separate_figures(b, arguments) for b in arguments.baselines}
    first, times = interleaved(arguments.baselines, workload, arguments.rounds, clip_of(arguments))
    report = {
        "workload": workload.name,
        "configuration": f"{workload.configuration}, {OPTIMIZER[clip_of(arguments)]}, float32",
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
        "floor_ms": workload.floating_point_operations / peak_flops() * 1e3,
        "rounds": arguments.rounds,
        "baselines": {
            baseline: {**separate[baseline], **summary(first, times, baseline)} for baseline in arguments.baselines
        },
    }
    print(table(report))
    print(json.dumps(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="transformer_lm", help="the model to time")
    parser.add_argument(
        "--baselines",
        nargs="+",
        default=list(BASELINES),
        help="eager, inductor, ort, ort-PASS, ort+spinning, ort+updates; each can be followed by +recompute and @bf16",
    )
    parser.add_argument(
        "--shape", nargs="*", type=dimension, default=[], metavar="NAME=N", help="such as layers=12 batch=8 length=512"
    )
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each baseline")
    parser.add_argument("--times-only", action="store_true", help="don't measure memory and the first step")
    parser.add_argument("--no-optimizer", action="store_true", help="compute gradients only, no clipping or optimizer")
    parser.add_argument("--no-clip", action="store_true", help="run the optimizer without clipping")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", help=argparse.SUPPRESS)
    return parser.parse_args()


def clip_of(arguments: argparse.Namespace) -> float | None:
    """The maximum norm of the gradients, 0 for no clipping, None without an optimizer."""
    if arguments.no_optimizer:
        return None
    return 0 if arguments.no_clip else CLIP


def dimension(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    return name, int(number)


def interleaved(
    baselines: list[str], workload: Workload, rounds: int, clip: float | None
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The times of the first step and of later steps, in milliseconds; each round has one step of every baseline."""
    runners = {baseline: Baseline(baseline, workload, clip=clip) for baseline in baselines}
    batch = workload.batch()
    first = {baseline: runner.step(batch) for baseline, runner in runners.items()}
    for _ in range(WARM_UP - 1):
        for runner in runners.values():
            runner.step(batch)
    times: dict[str, list[float]] = {baseline: [] for baseline in baselines}
    for k in range(rounds):
        # Each round starts with another baseline.
        for baseline in baselines[k % len(baselines) :] + baselines[: k % len(baselines)]:
            times[baseline].append(runners[baseline].step(batch))
    return first, times


def alone(baseline: str, workload: Workload, cache_dir: str | None, clip: float | None) -> dict[str, float]:
    """The time of the first step, and the peak resident memory above that of module and imports."""
    if not baseline.startswith("eager"):
        # The first compilation imports modules, which count neither for the step's time nor for its memory.
        backend = ORTBackend(ORTOptions(cache_dir=cache_dir)) if baseline.startswith("ort") else "inductor"
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    runner = Baseline(baseline, workload, cache_dir, clip)
    batch = workload.batch()
    resident = psutil.Process().memory_info().rss
    first = runner.step(batch) / 1e3
    for _ in range(STEPS_FOR_MEMORY - 1):
        runner.step(batch)
    peak = peak_rss_bytes()
    assert peak is not None, "benchmarks run on Linux, which reports the peak"
    return {"first_step_seconds": first, "peak_megabytes": (peak - resident) / 1e6}


def separate_figures(baseline: str, arguments: argparse.Namespace) -> dict[str, float]:
    """The figures of separate processes; `ort` has a second one that reads the compiled graph from the cache."""
    shape = [f"{name}={number}" for name, number in arguments.shape]
    options = ["--workload", arguments.workload, "--shape", *shape, "--alone", baseline]
    options += ["--no-optimizer"] if arguments.no_optimizer else []
    options += ["--no-clip"] if arguments.no_clip else []
    if not baseline.startswith("ort"):
        return in_separate_process(*options)
    with tempfile.TemporaryDirectory() as folder:
        first, second = (in_separate_process(*options, "--cache-dir", folder) for _ in range(2))
    return {**first, "cached_first_step_seconds": second["first_step_seconds"]}


def in_separate_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, *arguments]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def summary(first: dict[str, float], times: dict[str, list[float]], baseline: str) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "step_ms": medians[baseline],
        "compile_seconds": (first[baseline] - medians[baseline]) / 1e3,
        "ratio_to": {name: medians[baseline] / medians[name] for name in times if name != baseline},
        "all_ms": [round(value, 1) for value in times[baseline]],
    }


def peak_flops() -> float:
    """This machine's floating-point operations per second in a large float32 matmul."""
    size = 2048
    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds)


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['workload']}: {report['configuration']}",
        f"{report['machine']}; matmuls alone {report['floor_ms']:.0f} ms/step; medians of {report['rounds']} rounds",
        "",
        "| | ms/step | relative to eager | relative to inductor | first step, s | first step from cache, s | peak "
        "above module, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for baseline, row in report["baselines"].items():
        ratios = [f"{row['ratio_to'][name]:.2f}" if name in row["ratio_to"] else "" for name in ("eager", "inductor")]
        others = [f"{row[key]:.{digits}f}" if key in row else "" for key, digits in SEPARATE_FIGURES.items()]
        lines.append(f"| {' | '.join([baseline, f'{row[STEP]:.0f}', *ratios, *others])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
