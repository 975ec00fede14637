"""On paper: for how many processes a step's communication takes as long as its computation, by mode and bandwidth.

    python benchmarks/scaling_model.py --parameters 124e6 --step-ms 1000

Assumptions, of which each line of the table is a consequence and nothing was measured:

- Every process computes alone in `step_ms` on its own batch (weak scaling), two thirds of it in the backward.
- A link sends and receives at the same time at the bandwidth given, every process has one, and a message costs
  `latency` before its first byte. No two messages share a link.
- ddp: a ring all-reduce of the gradients, 2 (n - 1) / n of their bytes and 2 (n - 1) messages, after the step (fused)
  or hidden behind the backward (overlap), but for the last bucket.
- zero1: the same, and each process sends its updated part to all others, (n - 1) / n of the bytes around a ring.
- adasum: recursive halving and doubling, 2 (n - 1) / n of the bytes, 4 log2 n messages with the dot products' sums.
- pipeline: n stages and m micro-batches take (m + n - 1) / m of the computation, the bubble; each border sends
  activations forward and their gradients back, hidden behind the computation but for one micro-batch each way.
- tensor: n processes compute 1 / n of each layer and all-reduce activations four times a layer and step.
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

    parameters: of the model. step_s: of one process computing alone. bucket: bytes of a bucket. tokens, width, layers:
    of a process's batch and the model. micro_batches: of a pipeline. bandwidth: bytes a second. latency_s: of a
    message.
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
        """Seconds of an all-reduce."""
        return 2 * (ranks - 1) / ranks * size / self.bandwidth + 2 * (ranks - 1) * self.latency_s


def fused(s: Setting, ranks: int) -> float:
    return s.step_s + s.ring(s.gradient_bytes, ranks)


def overlapped(s: Setting, ranks: int) -> float:
    left = max(0.0, s.ring(s.gradient_bytes, ranks) - 2 / 3 * s.step_s)
    return s.step_s + max(left, s.ring(min(s.bucket, s.gradient_bytes), ranks))


def zero1(s: Setting, ranks: int) -> float:
    spread = (ranks - 1) / ranks * s.gradient_bytes / s.bandwidth + (ranks - 1) * s.latency_s
    return fused(s, ranks) + spread


def adasum(s: Setting, ranks: int) -> float:
    sent = 2 * (ranks - 1) / ranks * s.gradient_bytes / s.bandwidth
    return s.step_s + sent + 4 * math.log2(ranks) * s.latency_s


def pipeline(s: Setting, ranks: int) -> float:
    """Of a model that is `ranks` times as large as one process computes in `step_s`: a stage each."""
    bubble = (s.micro_batches + ranks - 1) / s.micro_batches
    border = s.activation_bytes / s.micro_batches / s.bandwidth + s.latency_s
    return bubble * s.step_s + 2 * (ranks - 1) * border


def tensor(s: Setting, ranks: int) -> float:
    """Of the same large model: each process has its part of every layer."""
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
        print(f"{gigabits} Gbit/s: share of a step that is computation; the last number of processes with half or more")
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
    parser.add_argument("--parameters", type=float, default=124e6)
    parser.add_argument("--step-ms", type=float, default=1000)
    parser.add_argument("--bucket-mb", type=float, default=25)
    parser.add_argument("--tokens", type=int, default=8192, help="of a process's batch")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--latency-us", type=float, default=50)
    parser.add_argument("--bandwidths", nargs="+", type=float, default=list(BANDWIDTHS_GBIT), help="Gbit/s")
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
