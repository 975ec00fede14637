"""What the engine adds to a session's run: a module of 100 small parameters, one fused graph; and steps of perceptrons.

    python benchmarks/overhead.py

Prints a table and one line of JSON. `engine` is the compiled graph's call with its backward, less the bare run of the
same session on the tensors of one call, less autograd alone: a function of as many inputs that hands ready gradients
out.
What Dynamo does around the graph, guards above all, is the same for any backend and stands by itself.
The perceptrons tell from which size on a step pays: forward, cross entropy and backward, beside eager.
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


class Kept(ORTBackend):
    """Keeps the graph that Dynamo hands over, and what it is called with."""

    graph: CompiledGraph
    given: tuple[Any, ...]

    def __call__(self, graph_module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graph = CompiledGraph(self, graph_module)

        def run(*given: Any) -> Any:
            self.given = given
            return self.graph(*given)

        return run


def main() -> None:
    arguments = parse()
    module, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), torch.randn(4, WIDTH)
    parameters = list(module.parameters())
    backend = Kept(ORTOptions(fallback="error"))

    def step(x: Tensor) -> Tensor:
        return module(x).square().mean()

    compiled = torch.compile(step, backend=backend)
    compiled(x).backward()
    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: step(x).backward(),
        "compiled": lambda: compiled(x).backward(),
        "graph": lambda: backend.graph(*backend.given)[0].backward(),
        "bare run": bare_run(backend),
        "autograd alone": autograd_alone(parameters),
    }
    medians = {name: 1e3 * seconds for name, seconds in interleaved(ways, parameters, arguments.rounds).items()}
    medians["engine"] = medians["graph"] - medians["bare run"] - medians["autograd alone"]
    medians["Dynamo"] = medians["compiled"] - medians["graph"]
    print("| | ms |\n|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value:.3f} |")
    print("\n| perceptron | eager, ms | ort, ms |\n|---|---|---|")
    perceptrons: dict[str, dict[str, float]] = {}
    for width, layers, batch in PERCEPTRONS:
        name = f"{layers} hidden layers of {width}, batch {batch}"
        found = perceptrons[name] = perceptron_steps(width, layers, batch, arguments.rounds)
        print(f"| {name} | {found['eager']:.3f} | {found['ort']:.3f} |")
    results = {"parameters": len(parameters), "rounds": arguments.rounds, "ms": medians, "perceptrons": perceptrons}
    print(f"\n{json.dumps(results)}")


def interleaved(
    ways: dict[str, Callable[[], Any]], parameters: Sequence[nn.Parameter], rounds: int
) -> dict[str, float]:
    """The median of each way's time, in seconds, the ways taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            for parameter in parameters:
                parameter.grad = None
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def perceptron_steps(width: int, layers: int, batch: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step in eager and compiled."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    module = nn.Sequential(*hidden, nn.Linear(width, CLASSES))
    x, y = torch.randn(batch, width), torch.randint(CLASSES, (batch,))

    def step(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(module(x), y)

    compiled = torch.compile(step, backend=ORTBackend(ORTOptions(fallback="error")))
    ways = {"eager": lambda: step(x, y).backward(), "ort": lambda: compiled(x, y).backward()}
    for way in ways.values():
        way()
    parameters = list(module.parameters())
    return {name: 1e3 * seconds for name, seconds in interleaved(ways, parameters, rounds).items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    return parser.parse_args()


def bare_run(backend: Kept) -> Callable[[], Any]:
    """The session's run alone, its inputs ready."""
    calls: list[tuple[Any, ...]] = []
    run = Session.run

    def watched(*call: Any) -> list[Tensor]:
        calls.append(call)
        return run(*call)

    with mock.patch.object(Session, "run", watched):
        backend.graph(*backend.given)
    return lambda: run(*calls[0])


def autograd_alone(parameters: Sequence[Tensor]) -> Callable[[], Any]:
    """A function of these parameters whose gradients are there."""
    gradients = [torch.zeros_like(parameter) for parameter in parameters]

    class Ready(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return tuple(gradients)

    return lambda: Ready.apply(*parameters).backward()


if __name__ == "__main__":
    main()
