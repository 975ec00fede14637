"""Times full training steps of baselines side by side: interleaved in one process, medians, ratios within the run.

    python benchmarks/step_time.py --workload transformer_lm --rounds 20

Prints a table, then one line of JSON with versions and configuration. Memory and the time to the first step are taken
in a process of their own for each baseline, and `ort`'s first step once more with its graph in the cache.
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
OWN_FIGURES = {"first_step_seconds": 1, "cached_first_step_seconds": 1, "peak_megabytes": 0}
STEPS_FOR_MEMORY = 5
OPTIMIZER = {None: "no optimizer", 0: "Adam (fused), no clip", CLIP: f"Adam (fused), clip {CLIP}"}
PACKAGES = ("torch", "onnxruntime-training-cpu", "lightning", "onnx")


def main() -> None:
    arguments = parse()
    workload = WORKLOADS[arguments.workload](**dict(arguments.shape))
    if arguments.alone:
        print(json.dumps(alone(arguments.alone, workload, arguments.cache_dir, clip_of(arguments))))
        return
    own = {r: {} if arguments.times_only else own_figures(r, arguments) for r in arguments.baselines}
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
            baseline: {**own[baseline], **summary(first, times, baseline)} for baseline in arguments.baselines
        },
    }
    print(table(report))
    print(json.dumps(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="transformer_lm")
    parser.add_argument(
        "--baselines",
        nargs="+",
        default=list(BASELINES),
        help="eager, inductor, ort, ort-PASS, ort+spinning, ort+updates; behind any of them +recompute, @bf16",
    )
    parser.add_argument(
        "--shape", nargs="*", type=figure, default=[], metavar="NAME=N", help="such as layers=12 batch=8 length=512"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--times-only", action="store_true", help="leave out memory and time to the first step")
    parser.add_argument("--no-optimizer", action="store_true", help="gradients alone, without clip and optimizer")
    parser.add_argument("--no-clip", action="store_true", help="the optimizer without clip")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", help=argparse.SUPPRESS)
    return parser.parse_args()


def clip_of(arguments: argparse.Namespace) -> float | None:
    """The limit of a gradient's norm, 0 for none, None without an optimizer."""
    if arguments.no_optimizer:
        return None
    return 0 if arguments.no_clip else CLIP


def figure(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    return name, int(number)


def interleaved(
    baselines: list[str], workload: Workload, rounds: int, clip: float | None
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The first step's time and those of later ones in milliseconds, one of every baseline in each round."""
    runners = {baseline: Baseline(baseline, workload, clip=clip) for baseline in baselines}
    batch = workload.batch()
    first = {baseline: runner.step(batch) for baseline, runner in runners.items()}
    for _ in range(WARM_UP - 1):
        for runner in runners.values():
            runner.step(batch)
    times: dict[str, list[float]] = {baseline: [] for baseline in baselines}
    for k in range(rounds):
        # Another order every round, so that nobody always follows the same one.
        for baseline in baselines[k % len(baselines) :] + baselines[: k % len(baselines)]:
            times[baseline].append(runners[baseline].step(batch))
    return first, times


def alone(baseline: str, workload: Workload, cache_dir: str | None, clip: float | None) -> dict[str, float]:
    """Time to the first step, and peak resident memory above what module and imports take."""
    if not baseline.startswith("eager"):
        # Imports are counted with the baseline, as a training script's are.
        backend = ORTBackend(ORTOptions(cache_dir=cache_dir)) if baseline.startswith("ort") else "inductor"
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    runner = Baseline(baseline, workload, cache_dir, clip)
    batch = workload.batch()
    resident = psutil.Process().memory_info().rss
    first = runner.step(batch) / 1e3
    for _ in range(STEPS_FOR_MEMORY - 1):
        runner.step(batch)
    peak = peak_rss_bytes()
    assert peak is not None, "benchmarks run on Linux, which tells"
    return {"first_step_seconds": first, "peak_megabytes": (peak - resident) / 1e6}


def own_figures(baseline: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Figures of processes of their own; `ort`'s fills a cache, which takes milliseconds, and another one reads it."""
    shape = [f"{name}={number}" for name, number in arguments.shape]
    given = ["--workload", arguments.workload, "--shape", *shape, "--alone", baseline]
    given += ["--no-optimizer"] if arguments.no_optimizer else []
    given += ["--no-clip"] if arguments.no_clip else []
    if not baseline.startswith("ort"):
        return in_own_process(*given)
    with tempfile.TemporaryDirectory() as folder:
        first, second = (in_own_process(*given, "--cache-dir", folder) for _ in range(2))
    return {**first, "cached_first_step_seconds": second["first_step_seconds"]}


def in_own_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, *arguments]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def summary(first: dict[str, float], times: dict[str, list[float]], baseline: str) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "step_ms": median[baseline],
        "compile_seconds": (first[baseline] - median[baseline]) / 1e3,
        "ratio_to": {name: median[baseline] / median[name] for name in times if name != baseline},
        "all_ms": [round(value, 1) for value in times[baseline]],
    }


def peak_flops() -> float:
    """This machine's floating-point operations a second in a large float32 product."""
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
        f"{report['machine']}; floor {report['floor_ms']:.0f} ms a step; medians of {report['rounds']} rounds",
        "",
        "| | ms a step | to eager | to inductor | first step s | from the cache s | peak MB above module |",
        "|---|---|---|---|---|---|---|",
    ]
    for baseline, row in report["baselines"].items():
        ratios = [f"{row['ratio_to'][name]:.2f}" if name in row["ratio_to"] else "" for name in ("eager", "inductor")]
        own = [f"{row[key]:.{digits}f}" if key in row else "" for key, digits in OWN_FIGURES.items()]
        lines.append(f"| {' | '.join([baseline, f'{row[STEP]:.0f}', *ratios, *own])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
