"""Training steps by the two builds of ONNX Runtime, each in an environment of its own, beside eager in one run.

    python -m benchmarks.builds --training TRAINING_ENVIRONMENT/bin/python --stock STOCK_ENVIRONMENT/bin/python

Prints a line of JSON for each model, and a table: medians of a step, resident memory above the module, and their ratios
with geometric means. The models, the steps and the turns are those of `benchmarks/suite.py`.
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
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.models:
        found[name] = measured(name, pythons, arguments.rounds)
        print(json.dumps({"model": name, "figures": found[name]}), flush=True)
    print(table(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", default=sys.executable, help="Python of an environment with the training build")
    parser.add_argument("--stock", required=True, help="Python of an environment with stock onnxruntime")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=TEN, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=12)
    return parser.parse_args()


def measured(name: str, pythons: dict[str, str], rounds: int) -> dict[str, Any]:
    """Figures by way: eager, and the two builds."""
    starting = {
        way: Process.started(name, SMALL, FLOAT32, EAGER if way == EAGER else ORT, python)
        for way, python in pythons.items()
    }
    return in_turns(starting, rounds)


def table(found: dict[str, dict[str, Any]]) -> str:
    rows = ["| model | eager ms | training | stock | stock / training | memory |", "|---|---|---|---|---|---|"]
    ratios: list[Sequence[float]] = []
    for name, figures in found.items():
        eager, training, stock = (statistics.median(figures[way]["step_ms"]) for way in (EAGER, TRAINING, STOCK))
        memory = figures[STOCK]["peak_mb"] / figures[TRAINING]["peak_mb"]
        ratios.append((training / eager, stock / eager, stock / training, memory))
        rows.append(f"| {name} | {eager:.1f} | {' | '.join(f'{ratio:.2f}' for ratio in ratios[-1])} |")
    means = " | ".join(f"{statistics.geometric_mean(column):.3f}" for column in zip(*ratios, strict=True))
    return "\n".join([*rows, f"| geometric mean | | {means} |", "", f"{machine()}."])


if __name__ == "__main__":
    main()
