"""Times regions beside torch's operators and inductor's kernels, at eight shapes each.

    python -m benchmarks.region_kernels                            # all of them, in a few minutes
    python -m benchmarks.region_kernels --names softmax gelu --rounds 40 --no-inductor

A case is one function of tensors, without matmuls, that becomes one region or a few: its kernels run as in a session,
torch's operators run one by one without autograd, and inductor compiles the function. Small cases run several times in
one call of a graph, as in a step, so that the call itself costs little. Prints a line of JSON for each
shape, and a table with the shapes at which regions are slower than torch's operators.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators import WARM_UP, table
from lit_ort.backend.backend import ORTBackend
from lit_ort.benchmark.machine import machine
from lit_ort.options import ORTOptions

aten = torch.ops.aten
SHAPES = ((4, 64), (32, 128), (64, 512), (256, 768), (512, 1024), (1024, 3072), (4096, 1024), (8192, 3072))
Function = Callable[..., Any]
_MOST_CALLS, _ELEMENTS = 32, 2**20


def main() -> None:
    arguments = parse()
    print(json.dumps({"machine": machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}))
    lines = [measure(name, shape, arguments.rounds, arguments.inductor) for name in arguments.names for shape in SHAPES]
    print(table(lines))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME", help="cases")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs at each shape")
    parser.add_argument("--inductor", action=argparse.BooleanOptionalAction, default=True, help="time inductor too")
    return parser.parse_args()


def measure(name: str, shape: tuple[int, int], rounds: int, inductor: bool) -> dict[str, Any]:
    """The medians of interleaved runs, in microseconds."""
    torch.manual_seed(0)
    calls = max(1, min(_MOST_CALLS, _ELEMENTS // math.prod(shape)))
    sets = [arguments_of(*shape) for _ in range(calls)]

    def function(sets: Sequence[Sequence[Tensor]]) -> list[Any]:
        return [CASES[name](*tensors) for tensors in sets]

    torch.compiler.reset()
    runs = {"ours": torch.compile(function, backend=ORTBackend(ORTOptions(fallback="error"))), "torch": function}
    if inductor:
        runs["inductor"] = torch.compile(function, backend="inductor")
    times: dict[str, list[float]] = {way: [] for way in runs}
    with torch.no_grad():
        for k in range(WARM_UP + rounds):
            for way, run in runs.items():
                start = time.perf_counter()
                run(sets)
                if k >= WARM_UP:
                    times[way].append(time.perf_counter() - start)
    medians = {f"{way}_us": round(1e6 * statistics.median(seconds) / calls, 1) for way, seconds in times.items()}
    line = {"operator": name, "shape": shape, **medians}
    print(json.dumps({**line, "ratio": round(medians["ours_us"] / medians["torch_us"], 2)}), flush=True)
    return line


def arguments_of(rows: int, width: int) -> tuple[Tensor, ...]:
    """Two matrices, two vectors of the width, and labels of the rows."""
    x, y = torch.randn(rows, width), torch.randn(rows, width)
    return x, y, torch.randn(width), torch.randn(width), torch.arange(rows) % width


def gelu(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return F.gelu(x)


def gelu_of_a_sum(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return F.gelu(x + b) + y


def gelu_gradient(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Any:
    grad = aten.gelu_backward(y, x)
    return grad, grad.sum(0)


def gated_silu(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return F.silu(x) * y


def tanh_of_a_sum(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return torch.tanh(x + b)


def softmax(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return (x * 0.125).softmax(-1)


def softmax_gradient(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return aten._softmax_backward_data(x, y, -1, torch.float32) * 0.125


def layer_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Any:
    return aten.native_layer_norm(x + y, w.shape, w, b, 1e-5)


def layer_norm_gradient(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Any:
    mean, scale = x.mean(-1, keepdim=True), x.var(-1, keepdim=True).rsqrt()
    return aten.native_layer_norm_backward(y, x, w.shape, mean, scale, w, b, [True, True, True])


def rms_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    total = x + y
    return total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def rotation(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    half = x.size(1) // 2
    return x * w + torch.cat([-x[:, half:], x[:, :half]], 1) * b


def cross_entropy(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Any:
    logs = x.log_softmax(-1)
    return -logs.gather(1, labels[:, None]).mean(), logs.exp() - y


def sum_of_columns(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return (x * y).sum(0)


def clipped_step(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Any:
    first, second = x * 0.9 + y * 0.1, (x * x) * 0.99 + (y * y) * 0.01
    return x - first / (second.sqrt() + 1e-8) * 1e-3, first, second


def cast_to_bfloat16(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return (x * w).bfloat16()


CASES: dict[str, Function] = {
    function.__name__: function
    for function in (
        *(gelu, gelu_of_a_sum, gelu_gradient, gated_silu, tanh_of_a_sum),
        *(softmax, softmax_gradient, layer_norm, layer_norm_gradient, rms_norm),
        *(rotation, cross_entropy, sum_of_columns, clipped_step, cast_to_bfloat16),
    )
}


if __name__ == "__main__":
    main()
