"""Compares training steps with the two builds of ONNX Runtime, in separate environments, and with eager in one run.

    python -m benchmarks.builds --training TRAINING_ENVIRONMENT/bin/python --stock STOCK_ENVIRONMENT/bin/python

Prints a line of JSON for each model, and a table with median step times, the ratios of step times and of peak memory
above the module, and geometric means. Models, steps and turns are those of `benchmarks/suite.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.models import MODELS
from benchmarks.suite import FLOAT32, SMALL, Process, in_turns
from lit_ort.benchmark.machine import machine
from lit_ort.benchmark.result import EAGER, ORT
from lit_ort.options import STOCK, TRAINING

TEN = ("BERT", "GPT-2", "Llama", "T5", "ViT", "ResNet", "MLP", "LSTM", "graph network", "task transformer LM")


def main() -> None:
    arguments = parse()
    pythons = {EAGER: arguments.training, TRAINING: arguments.training, STOCK: arguments.stock}
    figures: dict[str, dict[str, Any]] = {}
    for name in arguments.models:
        figures[name] = measure_model(name, pythons, arguments.rounds)
        print(json.dumps({"model": name, "figures": figures[name]}), flush=True)
    print(table(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", default=sys.executable, help="Python of an environment with the training build")
    parser.add_argument("--stock", required=True, help="Python of an environment with stock onnxruntime")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=TEN, metavar="MODEL", help="models to run")
    parser.add_argument("--rounds", type=int, default=12, help="timed turns of each baseline")
    return parser.parse_args()


def measure_model(name: str, pythons: dict[str, str], rounds: int) -> dict[str, Any]:
    """The figures of a model in eager and with each build."""
    processes = {
        baseline: Process.started(name, SMALL, FLOAT32, EAGER if baseline == EAGER else ORT, python)
        for baseline, python in pythons.items()
    }
    return in_turns(processes, rounds)


def table(figures: dict[str, dict[str, Any]]) -> str:
    rows = [
        "| model | eager, ms | training / eager | stock / eager | stock / training | memory, stock / training |",
        "|---|---|---|---|---|---|",
    ]
    ratios: list[Sequence[float]] = []
    for name, by_baseline in figures.items():
        eager, training, stock = (statistics.median(by_baseline[b]["step_ms"]) for b in (EAGER, TRAINING, STOCK))
        memory = by_baseline[STOCK]["peak_mb"] / by_baseline[TRAINING]["peak_mb"]
        ratios.append((training / eager, stock / eager, stock / training, memory))
        rows.append(f"| {name} | {eager:.1f} | {' | '.join(f'{ratio:.2f}' for ratio in ratios[-1])} |")
    means = " | ".join(f"{statistics.geometric_mean(column):.3f}" for column in zip(*ratios, strict=True))
    return "\n".join([*rows, f"| geometric mean | | {means} |", "", f"{machine()}."])


if __name__ == "__main__":
    main()
