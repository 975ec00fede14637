"""Measures the overhead of lit_ort around a session's run, and steps of small perceptrons.

    python benchmarks/overhead.py

Prints tables and one line of JSON. The module of the first table has 100 small parameters and is one fused graph.
`engine` is the time of the compiled graph's call with its backward, minus `bare run`, the same session's run on the
tensors of one call, minus `autograd alone`, an autograd function with as many inputs that returns ready gradients.
`Dynamo` is the time that Dynamo adds around the graph, mostly for guards; it is the same for any backend.
The perceptrons show from which size a step is faster than in eager: forward, cross entropy and backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lit_ort import ORTOptions
from lit_ort.backend.backend import CompiledGraph, ORTBackend
from lit_ort.runtime.session import Session

LAYERS, WIDTH = 50, 8
# Width, hidden layers and batch of each perceptron.
PERCEPTRONS = ((32, 2, 32), (128, 3, 64), (256, 3, 256), (784, 3, 128))
CLASSES = 10


class RecordingBackend(ORTBackend):
    """Keeps the graph that Dynamo passes to it, and the arguments of its last call."""

    graph: CompiledGraph
    arguments: tuple[Any, ...]

    def __call__(self, graph_module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graph = CompiledGraph(self, graph_module)

        def run(*arguments: Any) -> Any:
            self.arguments = arguments
            return self.graph(*arguments)

        return run


def main() -> None:
    arguments = parse()
    module, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), torch.randn(4, WIDTH)
    parameters = list(module.parameters())
    backend = RecordingBackend(ORTOptions(fallback="error"))

    def step(x: Tensor) -> Tensor:
        return module(x).square().mean()

    compiled = torch.compile(step, backend=backend)
    compiled(x).backward()
    calls: dict[str, Callable[[], Any]] = {
        "eager": lambda: step(x).backward(),
        "compiled": lambda: compiled(x).backward(),
        "graph": lambda: backend.graph(*backend.arguments)[0].backward(),
        "bare run": bare_run(backend),
        "autograd alone": autograd_alone(parameters),
    }
    medians = {name: 1e3 * seconds for name, seconds in interleaved(calls, parameters, arguments.rounds).items()}
    medians["engine"] = medians["graph"] - medians["bare run"] - medians["autograd alone"]
    medians["Dynamo"] = medians["compiled"] - medians["graph"]
    print("| | ms |\n|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value:.3f} |")
    print("\n| perceptron | eager, ms | ort, ms |\n|---|---|---|")
    perceptrons: dict[str, dict[str, float]] = {}
    for width, layers, batch in PERCEPTRONS:
        name = f"{layers} hidden layers of {width}, batch {batch}"
        figures = perceptrons[name] = perceptron_steps(width, layers, batch, arguments.rounds)
        print(f"| {name} | {figures['eager']:.3f} | {figures['ort']:.3f} |")
    results = {"parameters": len(parameters), "rounds": arguments.rounds, "ms": medians, "perceptrons": perceptrons}
    print(f"\n{json.dumps(results)}")


def interleaved(
    calls: dict[str, Callable[[], Any]], parameters: Sequence[nn.Parameter], rounds: int
) -> dict[str, float]:
    """The median time of each call in seconds; calls run in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for parameter in parameters:
                parameter.grad = None
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def perceptron_steps(width: int, layers: int, batch: int, rounds: int) -> dict[str, float]:
    """The time of a step in eager and with lit_ort, in milliseconds."""
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    module = nn.Sequential(*hidden, nn.Linear(width, CLASSES))
    x, y = torch.randn(batch, width), torch.randint(CLASSES, (batch,))

    def step(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(module(x), y)

    compiled = torch.compile(step, backend=ORTBackend(ORTOptions(fallback="error")))
    calls = {"eager": lambda: step(x, y).backward(), "ort": lambda: compiled(x, y).backward()}
    for call in calls.values():
        call()
    parameters = list(module.parameters())
    return {name: 1e3 * seconds for name, seconds in interleaved(calls, parameters, rounds).items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500, help="timed calls of each kind")
    return parser.parse_args()


def bare_run(backend: RecordingBackend) -> Callable[[], Any]:
    """The session's run alone, with the inputs of one call."""
    calls: list[tuple[Any, ...]] = []
    run = Session.run

    def recorded(*arguments: Any) -> list[Tensor]:
        calls.append(arguments)
        return run(*arguments)

    with mock.patch.object(Session, "run", recorded):
        backend.graph(*backend.arguments)
    return lambda: run(*calls[0])


def autograd_alone(parameters: Sequence[Tensor]) -> Callable[[], Any]:
    """An autograd function of the parameters that returns ready gradients, with its backward."""
    gradients = [torch.zeros_like(parameter) for parameter in parameters]

    class Ready(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return tuple(gradients)

    return lambda: Ready.apply(*parameters).backward()


if __name__ == "__main__":
    main()
