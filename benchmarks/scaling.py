"""Measures step time and memory with one and more processes on this machine, in eager and with ONNX Runtime.

    python benchmarks/scaling.py --workload gpt2 --ranks 1 2

Each process has a complete batch of the workload and an equal part of the cores. For each number of processes, the
baselines' steps are interleaved in one process group; memory is measured in separate process groups. Prints a table,
then one line of JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step_time import PACKAGES, STEPS_FOR_MEMORY, WARM_UP, dimension
from benchmarks.workloads import LEARNING_RATE, WORKLOADS, Workload
from lit_ort import ORTBackend, ORTOptions
from lit_ort._compat.torch_dynamo import graphs_by_bucket
from lit_ort.benchmark.machine import machine
from lit_ort.callbacks import MIB, peak_rss_bytes
from lit_ort.distributed.adasum import AdaSum, adasum_hook
from tests.ranks import run_on_ranks

BASELINES = ("eager", "ort")
SUFFIXES = ("apart", "overlap", "views", "zero1", "adasum")


class Step(nn.Module):
    """A module whose forward is a workload's loss, for DistributedDataParallel."""

    def __init__(self, workload: Workload, compiled: bool) -> None:
        super().__init__()
        self.module = workload.build()
        backend = ORTBackend(ORTOptions(fallback="error"))
        self._loss = torch.compile(workload.loss, backend=backend) if compiled else workload.loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss(self.module, batch)


class Baseline:
    """Runs steps in one baseline.

    Args:
        name: `eager` or `ort`, followed by any of `+overlap`, `+views` (gradients as bucket views), `+zero1`, `+adasum`
            and `+apart` (no communication, which shows the cost of computing at the same time).
        workload: the step.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        torch.manual_seed(0)
        engine, *suffixes = name.split("+")
        self._overlap = "overlap" in suffixes
        step = Step(workload, engine == "ort")
        self._step: nn.Module = step
        if dist.get_world_size() > 1 and "apart" not in suffixes:
            parallel = DistributedDataParallel(step, gradient_as_bucket_view="views" in suffixes)
            if "adasum" in suffixes:
                parallel.register_comm_hook(AdaSum(), adasum_hook)
            self._step = parallel
        self._optimizer: torch.optim.Optimizer = torch.optim.Adam(step.parameters(), lr=LEARNING_RATE, fused=True)
        if "zero1" in suffixes:
            from lit_ort.distributed.sharding import ShardedOptimizer

            self._optimizer = ShardedOptimizer(self._optimizer)

    def step(self, batch: Any) -> float:
        """Runs a step (zero_grad, loss, backward, optimizer) and returns its time in milliseconds."""
        start = time.perf_counter()
        self._optimizer.zero_grad()
        with graphs_by_bucket(self._overlap):
            loss = self._step(batch)
        loss.backward()
        self._optimizer.step()
        return (time.perf_counter() - start) * 1e3

    def optimizer_bytes(self) -> int:
        states = getattr(self._optimizer, "optim", self._optimizer).state.values()
        return sum(v.numel() * v.element_size() for state in states for v in state.values() if torch.is_tensor(v))


def main() -> None:
    arguments = parse()
    report = {
        "workload": arguments.workload,
        "configuration": WORKLOADS[arguments.workload](**dict(arguments.shape)).configuration,
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
        "rounds": arguments.rounds,
        "ranks": {ranks: measure_ranks(ranks, arguments) for ranks in arguments.ranks},
    }
    print(table(report))
    print(json.dumps(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="transformer_lm", help="the model to time")
    parser.add_argument("--shape", nargs="*", type=dimension, default=[], metavar="NAME=N", help="such as layers=2")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="numbers of processes")
    parser.add_argument(
        "--baselines", nargs="+", type=baseline, default=list(BASELINES), help="eager, ort, ort+overlap ..."
    )
    parser.add_argument(
        "--threads", type=int, help="threads of each process; by default the cores divided by the largest of --ranks"
    )
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each baseline")
    return parser.parse_args()


def baseline(name: str) -> str:
    engine, *suffixes = name.split("+")
    if engine not in BASELINES or not set(suffixes) <= set(SUFFIXES):
        raise argparse.ArgumentTypeError(
            f"{name!r} is not one of {', '.join(BASELINES)}, followed by any of +{', +'.join(SUFFIXES)}"
        )
    return name


def measure_ranks(ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The baselines' figures with `ranks` processes."""
    threads = arguments.threads or max(1, (os.cpu_count() or 1) // max(arguments.ranks))
    settings = (arguments.workload, dict(arguments.shape), threads)
    times = run_on_ranks(step_times, ranks, *settings, list(arguments.baselines), arguments.rounds)
    memory = {name: run_on_ranks(memory_use, ranks, *settings, name) for name in arguments.baselines}
    # A step ends when its slowest process ends.
    slowest = {name: map(max, zip(*(by_name[name] for by_name in times), strict=True)) for name in arguments.baselines}
    step_ms = {name: statistics.median(values) for name, values in slowest.items()}
    return {
        name: {
            "step_ms": step_ms[name],
            "to_eager": step_ms[name] / step_ms.get("eager", step_ms[name]),
            "peak_mib": max(figures["peak_mib"] for figures in memory[name]),
            "optimizer_mib": max(figures["optimizer_mib"] for figures in memory[name]),
        }
        for name in arguments.baselines
    }


def step_times(
    workload_name: str, shape: dict[str, int], threads: int, baselines: list[str], rounds: int
) -> dict[str, list[float]]:
    """Runs on each process: the times of steps, one of every baseline in each round."""
    workload, batch = begin(workload_name, shape, threads)
    runners = {name: Baseline(name, workload) for name in baselines}
    for _ in range(WARM_UP):
        for runner in runners.values():
            runner.step(batch)
    times: dict[str, list[float]] = {name: [] for name in baselines}
    for k in range(rounds):
        for name in baselines[k % len(baselines) :] + baselines[: k % len(baselines)]:
            dist.barrier()
            times[name].append(runners[name].step(batch))
    dist.destroy_process_group()
    return times


def memory_use(workload_name: str, shape: dict[str, int], threads: int, name: str) -> dict[str, float]:
    """Runs on each process: its peak memory above module and imports, and the size of its optimizer state."""
    workload, batch = begin(workload_name, shape, threads)
    if name.startswith("ort"):
        torch.compile(lambda x: x + 1, backend=ORTBackend(ORTOptions()))(torch.zeros(2))
    runner = Baseline(name, workload)
    resident = psutil.Process().memory_info().rss
    for _ in range(STEPS_FOR_MEMORY):
        runner.step(batch)
    peak = peak_rss_bytes()
    assert peak is not None, "benchmarks run on Linux, which reports the peak"
    optimizer_bytes = runner.optimizer_bytes()
    dist.destroy_process_group()
    return {"peak_mib": (peak - resident) / MIB, "optimizer_mib": optimizer_bytes / MIB}


def begin(workload_name: str, shape: dict[str, int], threads: int) -> tuple[Workload, Any]:
    """Joins the process group; returns the workload and this process's batch."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    workload = WORKLOADS[workload_name](**shape)
    torch.manual_seed(dist.get_rank())
    return workload, workload.batch()


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['workload']}: {report['configuration']}, Adam (fused), no clip",
        f"{report['machine']}; medians of {report['rounds']} rounds",
        "",
        "| processes | | ms/step | relative to eager | peak above module, MiB | optimizer state, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for ranks, baselines in report["ranks"].items():
        for name, row in baselines.items():
            cells = [f"{row['step_ms']:.0f}", f"{row['to_eager']:.2f}"]
            cells += [f"{row['peak_mib']:.0f}", f"{row['optimizer_mib']:.0f}"]
            lines.append(f"| {ranks} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
