"""Measures the overhead of a node in ONNX Runtime and in torch, on tensors so small that the operators cost nothing.

`python -m benchmarks.engines` prints the time in microseconds of an ONNX Runtime node, of a statement of a torch node,
and of passing values between the two. They are computed from runs of 64 operators: all in ONNX Runtime, all in one
torch node, and alternating. The constant `SHORTEST_RUN` of `lit_ort.lower.engines` follows from these times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import fx

from lit_ort.capture.input_sources import SOURCE
from lit_ort.joint.phases import PhaseGraph
from lit_ort.lower.lower import lower
from lit_ort.options import AUTO
from lit_ort.runtime.engines.choice import engine_of
from lit_ort.runtime.program import Source
from lit_ort.runtime.session import RunInputs, Session, SessionOptions

ADDITIONS = 64
aten = torch.ops.aten
# An operator that is lowered to ONNX Runtime, and one that is lowered to torch.
BY_ONNX, BY_TORCH = aten.add.Tensor, aten.relu.default


def main() -> None:
    settings = parse()
    torch.set_num_threads(settings.threads)
    x = torch.randn(settings.elements)
    medians = {
        "onnx": median_us(session([BY_ONNX] * ADDITIONS, x), x, settings.runs),
        "torch": median_us(session([BY_TORCH] * ADDITIONS, x), x, settings.runs),
        "borders": median_us(session(([BY_ONNX] * 8 + [BY_TORCH] * 8) * (ADDITIONS // 16), x), x, settings.runs),
    }
    pairs = ADDITIONS // 16
    figures = {
        "onnx_node_us": medians["onnx"] / ADDITIONS,
        "torch_statement_us": medians["torch"] / ADDITIONS,
        "border_pair_us": (medians["borders"] - (medians["onnx"] + medians["torch"]) / 2) / pairs,
    }
    print(json.dumps({"elements": settings.elements, "threads": settings.threads, **figures}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=256, help="elements of each tensor")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of the session")
    parser.add_argument("--runs", type=int, default=300, help="timed runs of each session")
    return parser.parse_args()


def session(targets: list[Any], x: torch.Tensor) -> Session:
    """A session of a chain of operators."""
    graph = fx.Graph()
    placeholder = graph.placeholder("x")
    placeholder.meta = {"val": x, SOURCE: Source("tensor", 0)}
    value = placeholder
    for target in targets:
        arguments = (value, placeholder) if target is BY_ONNX else (value,)
        value = graph.call_function(target, arguments)
        value.meta = {"val": x}
    graph.output((value,))
    engine = engine_of(AUTO)
    phase = lower(PhaseGraph(fx.GraphModule(torch.nn.Module(), graph), 1), {}, "chain", engine.keeps_order).phase
    return Session(phase, SessionOptions(engine=engine, threads=torch.get_num_threads()))


def median_us(chain: Session, x: torch.Tensor, runs: int) -> float:
    """The median time of a run, in microseconds."""
    inputs = RunInputs([x], [x.shape])
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        chain.run(inputs)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
