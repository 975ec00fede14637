"""Estimates which share of a step is computation, by strategy, bandwidth and number of processes. Measures nothing.

    python benchmarks/scaling_model.py --parameters 124e6 --step-ms 1000

The table follows from these assumptions:

- Each process computes a step on its own batch in `step_ms` (weak scaling), two thirds of it in the backward.
- Every process has a link that sends and receives at the same time with the given bandwidth. A message costs `latency`
  before its first byte. Messages don't share links.
- ort_ddp: a ring all-reduce of the gradients, 2 (n - 1) / n of their bytes and 2 (n - 1) messages, after the backward.
  With overlap, it runs during the backward, except for the last bucket.
- ort_zero1: the same, and each process sends its updated part to all others, (n - 1) / n of the bytes around a ring.
- adasum: recursive halving and doubling, 2 (n - 1) / n of the bytes, 4 log2 n messages with the sums of dot products.
- ort_pipeline: n stages and m micro-batches take (m + n - 1) / m of the computation time because of the bubble. Between
  two stages, activations are sent forward and their gradients backward, during the computation except for one
  micro-batch in each direction.
- ort_tensor: n processes compute 1 / n of each layer and all-reduce activations four times for each layer and step.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
BANDWIDTHS_GBIT = (1, 10, 100, 400)
FLOAT = 4


@dataclass(frozen=True)
class Setting:
    """A model and its network.

    Args:
        parameters: the number of the model's parameters.
        step_s: the time of a step in one process without communication.
        bucket: the bytes of a bucket.
        tokens: the tokens of a process's batch.
        width, layers: of the model.
        micro_batches: of a pipeline.
        bandwidth: in bytes per second.
        latency_s: of a message.
    """

    parameters: float
    step_s: float
    bucket: float
    tokens: int
    width: int
    layers: int
    micro_batches: int
    bandwidth: float
    latency_s: float

    @property
    def gradient_bytes(self) -> float:
        return FLOAT * self.parameters

    @property
    def activation_bytes(self) -> float:
        return FLOAT * self.tokens * self.width

    def ring(self, size: float, ranks: int) -> float:
        """The time of a ring all-reduce, in seconds."""
        return 2 * (ranks - 1) / ranks * size / self.bandwidth + 2 * (ranks - 1) * self.latency_s


def fused(s: Setting, ranks: int) -> float:
    return s.step_s + s.ring(s.gradient_bytes, ranks)


def overlapped(s: Setting, ranks: int) -> float:
    remainder = max(0.0, s.ring(s.gradient_bytes, ranks) - 2 / 3 * s.step_s)
    return s.step_s + max(remainder, s.ring(min(s.bucket, s.gradient_bytes), ranks))


def zero1(s: Setting, ranks: int) -> float:
    broadcast = (ranks - 1) / ranks * s.gradient_bytes / s.bandwidth + (ranks - 1) * s.latency_s
    return fused(s, ranks) + broadcast


def adasum(s: Setting, ranks: int) -> float:
    transfer = 2 * (ranks - 1) / ranks * s.gradient_bytes / s.bandwidth
    return s.step_s + transfer + 4 * math.log2(ranks) * s.latency_s


def pipeline(s: Setting, ranks: int) -> float:
    """For a model that is `ranks` times as large as the one of `step_s`, so that each process has one stage."""
    bubble = (s.micro_batches + ranks - 1) / s.micro_batches
    transfer = s.activation_bytes / s.micro_batches / s.bandwidth + s.latency_s
    return bubble * s.step_s + 2 * (ranks - 1) * transfer


def tensor(s: Setting, ranks: int) -> float:
    """For a model of the same size as in `pipeline`; each process has a part of every layer."""
    return s.step_s + 4 * s.layers * s.ring(s.activation_bytes, ranks)


MODES: dict[str, Callable[[Setting, int], float]] = {
    "ort_ddp": fused,
    "ort_ddp overlap": overlapped,
    "ort_zero1": zero1,
    "adasum": adasum,
    "ort_pipeline": pipeline,
    "ort_tensor": tensor,
}


def main() -> None:
    arguments = parse()
    report = {}
    for gigabits in arguments.bandwidths:
        setting = setting_of(arguments, gigabits)
        report[gigabits] = {
            name: {ranks: setting.step_s / mode(setting, ranks) for ranks in RANKS} for name, mode in MODES.items()
        }
        print(
            f'{gigabits} Gbit/s: share of computation in a step, by number of processes; "half": the largest number '
            "with a share of at least 0.5"
        )
        print(table(report[gigabits]))
    print(json.dumps({"assumed": vars(arguments), "efficiency": report}))


def setting_of(arguments: argparse.Namespace, gigabits: float) -> Setting:
    return Setting(
        parameters=arguments.parameters,
        step_s=arguments.step_ms / 1e3,
        bucket=arguments.bucket_mb * 2**20,
        tokens=arguments.tokens,
        width=arguments.width,
        layers=arguments.layers,
        micro_batches=arguments.micro_batches,
        bandwidth=gigabits * 1e9 / 8,
        latency_s=arguments.latency_us / 1e6,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=124e6, help="parameters of the model")
    parser.add_argument("--step-ms", type=float, default=1000, help="time of a step without communication")
    parser.add_argument("--bucket-mb", type=float, default=25, help="MiB of a gradient bucket")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a process's batch")
    parser.add_argument("--width", type=int, default=768, help="width of the model")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a pipeline")
    parser.add_argument("--latency-us", type=float, default=50, help="latency of a message")
    parser.add_argument("--bandwidths", nargs="+", type=float, default=list(BANDWIDTHS_GBIT), help="in Gbit/s")
    return parser.parse_args()


def table(modes: dict[str, dict[int, float]]) -> str:
    lines = [f"| | {' | '.join(map(str, RANKS))} | half |", "|---|" + "---|" * (len(RANKS) + 1)]
    for name, shares in modes.items():
        half = max((ranks for ranks, share in shares.items() if share >= 0.5), default=None)
        cells = [f"{share:.2f}" for share in shares.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {half or f'under {RANKS[0]}'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
