"""Times forward and backward of each operator that has a kernel in lit_ort, compared with torch, at eight shapes.

    python -m benchmarks.operators                      # all of them, in a few minutes
    python -m benchmarks.operators --names gru dropout --rounds 40

Kernels run as in a session, with memory from a pool and without autograd, but for recurrent layers, whose matmuls
autograd differentiates. torch runs its ATen operators, or autograd if there is no operator for the backward. Prints a
line of JSON for each shape, and a table with the shapes at which a kernel is slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_ort.benchmark.machine import machine
from lit_ort.ops import OPERATORS
from lit_ort.runtime.buffers import BufferPool

aten = torch.ops.aten
lit_ort_ops = torch.ops.lit_ort
Run = Callable[[], Any]
POOL = BufferPool()
WARM_UP = 3
# Ratios above this are more than noise.
SLOWER = 1.05


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator and its gradient.

    Args:
        make: returns, for a shape, a function that runs lit_ort's kernels and one that runs torch.
        shapes: from tiny to large.
    """

    make: Callable[..., tuple[Run, Run]]
    shapes: Sequence[tuple[int, ...]]


def main() -> None:
    arguments = parse()
    print(json.dumps({"machine": machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}))
    lines = [measure_shape(name, shape, arguments.rounds) for name in arguments.names for shape in CASES[name].shapes]
    print(table(lines))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--names", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME", help="operators to time"
    )
    parser.add_argument("--rounds", type=int, default=20, help="timed runs at each shape")
    return parser.parse_args()


def measure_shape(name: str, shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """The medians of interleaved runs, in microseconds."""
    torch.manual_seed(0)
    runs = CASES[name].make(*shape)
    times: list[list[float]] = [[], []]
    with torch.no_grad():
        for k in range(WARM_UP + rounds):
            for seconds, run in zip(times, runs, strict=True):
                start = time.perf_counter()
                run()
                if k >= WARM_UP:
                    seconds.append(time.perf_counter() - start)
    kernel_us, torch_us = (1e6 * statistics.median(seconds) for seconds in times)
    line = {"operator": name, "shape": shape, "ours_us": round(kernel_us, 1), "torch_us": round(torch_us, 1)}
    print(json.dumps({**line, "ratio": round(kernel_us / torch_us, 2)}), flush=True)
    return line


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The ratios of times by operator, from its smallest shape to its largest."""
    rows = ["| operator | lit_ort / torch, from the smallest shape to the largest | slower at |", "|---|---|---|"]
    for name in dict.fromkeys(line["operator"] for line in lines):
        ratios = [(line["shape"], line["ours_us"] / line["torch_us"]) for line in lines if line["operator"] == name]
        slower = ", ".join("x".join(map(str, shape)) for shape, ratio in ratios if ratio > SLOWER)
        rows.append(f"| {name} | {' '.join(f'{ratio:.2f}' for _, ratio in ratios)} | {slower or 'none'} |")
    return "\n".join(rows)


def kernel(target: Any) -> Callable[..., Any]:
    """A kernel as sessions call it."""
    operator = OPERATORS[target]
    return lambda *args, **kwargs: operator.kernel(POOL, *args, **kwargs)


def gradients(function: Callable[..., Tensor], leaves: Sequence[Tensor], tangent: Tensor | None = None) -> Run:
    """Returns a function that runs forward and backward with autograd."""
    tracked = [leaf.detach().requires_grad_() for leaf in leaves]

    def run() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(function(*tracked), tracked, tangent)

    return run


def linear(rows: int, width: int, outputs: int) -> tuple[Run, Run]:
    """The three matmuls of a linear layer."""
    x, weight, bias, grad = (torch.randn(s) for s in ((rows, width), (outputs, width), (outputs,), (rows, outputs)))

    def run(mm: Callable[..., Tensor], addmm: Callable[..., Tensor]) -> Run:
        return lambda: (addmm(bias, x, weight.t()), mm(grad.t(), x), mm(grad, weight))

    return run(kernel(aten.mm.default), kernel(aten.addmm.default)), run(aten.mm.default, aten.addmm.default)


def stacked(batch: int, rows: int, width: int) -> tuple[Run, Run]:
    """The three matmuls of q k^T."""
    q, k, grad = torch.randn(batch, rows, width), torch.randn(batch, rows, width), torch.randn(batch, rows, rows)

    def run(bmm: Callable[..., Tensor]) -> Run:
        return lambda: (bmm(q, k.mT), bmm(grad, k), bmm(grad.mT, q))

    return run(kernel(aten.bmm.default)), run(aten.bmm.default)


def dropout(rows: int, width: int) -> tuple[Run, Run]:
    x, grad, seed = torch.randn(rows, width), torch.randn(rows, width), torch.tensor(5)
    forward, backward = kernel(lit_ort_ops.dropout.default), kernel(lit_ort_ops.dropout_backward.default)

    def by_lit_ort() -> Any:
        _, mask = forward(x, seed, 0.1, 0)
        return backward(grad, mask, seed, 0.1)

    def by_torch() -> Any:
        _, mask = aten.native_dropout(x, 0.1, True)
        return aten.native_dropout_backward(grad, mask, 1 / 0.9)

    return by_lit_ort, by_torch


def embedding(words: int, width: int, tokens: int) -> tuple[Run, Run]:
    """The gradient only, since the forward is torch's."""
    indices, grad = torch.randint(words, (tokens,)), torch.randn(tokens, width)
    gradient = kernel(lit_ort_ops.embedding_gradient.default)
    reference = aten.embedding_dense_backward
    return lambda: gradient(grad, indices, words, -1), lambda: reference(grad, indices, words, -1, False)


def attention(batch: int, heads: int, length: int, width: int, *, p: float, causal: bool) -> tuple[Run, Run]:
    q, k, v, grad = (torch.randn(batch, length, heads, width).transpose(1, 2) for _ in range(4))
    seed, scale = torch.tensor(5), width**-0.5
    forward, backward = kernel(lit_ort_ops.attention.default), kernel(lit_ort_ops.attention_backward.default)

    def by_lit_ort() -> Any:
        forward(q, k, v, None, seed, p, causal, scale, 0)
        return backward(grad, q, k, v, None, seed, p, causal, scale, 0)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal, scale=scale)

    return by_lit_ort, gradients(function, (q, k, v), grad)


def attention_with_dropout(*shape: int) -> tuple[Run, Run]:
    return attention(*shape, p=0.1, causal=False)


def causal_attention_with_dropout(*shape: int) -> tuple[Run, Run]:
    return attention(*shape, p=0.1, causal=True)


def linear_cross_entropy(rows: int, width: int, classes: int) -> tuple[Run, Run]:
    hidden, weight, labels = torch.randn(rows, width), torch.randn(classes, width) * 0.02, torch.arange(rows) % classes
    operator = kernel(lit_ort_ops.linear_cross_entropy.default)

    def by_lit_ort() -> Any:
        return operator(hidden, weight, None, labels, None, -100, True, False, [True, True, False])

    return by_lit_ort, gradients(lambda h, w: F.cross_entropy(h @ w.t(), labels), (hidden, weight))


def recurrent(length: int, batch: int, width: int, *, mode: str) -> tuple[Run, Run]:
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "tanh": torch.nn.RNN}[mode](width, width)
    x, state, grad = torch.randn(length, batch, width), torch.zeros(1, batch, width), torch.randn(length, batch, width)
    cell = state if mode == "lstm" else None
    leaves = [x, *layer.parameters()]

    def by_lit_ort() -> Any:
        # Torch differentiates the matmuls around the loop, as in a step.
        with torch.enable_grad():
            given = leaves[0].requires_grad_(), state, cell
            output, *_ = lit_ort_ops.recurrent_layer(*given, *leaves[1:], mode, False)
            return torch.autograd.grad(output, leaves, grad)

    def by_torch() -> Any:
        with torch.enable_grad():
            given = state if cell is None else (state, cell)
            return torch.autograd.grad(layer(leaves[0].requires_grad_(), given)[0], leaves, grad)

    return by_lit_ort, by_torch


def lstm(*shape: int) -> tuple[Run, Run]:
    return recurrent(*shape, mode="lstm")


def gru(*shape: int) -> tuple[Run, Run]:
    return recurrent(*shape, mode="gru")


def plain_recurrent(*shape: int) -> tuple[Run, Run]:
    return recurrent(*shape, mode="tanh")


def cast(rows: int, width: int) -> tuple[Run, Run]:
    x = torch.randn(rows, width)
    narrow, to_copy = x.bfloat16(), kernel(aten._to_copy.default)

    def run(copy: Callable[..., Tensor]) -> Run:
        return lambda: (copy(x, dtype=torch.bfloat16), copy(narrow, dtype=torch.float32))

    return run(to_copy), run(aten._to_copy)


_MATRICES = ((16, 64), (64, 128), (256, 256), (512, 512), (520, 1024), (1024, 1024), (2048, 3072), (8192, 3072))
_LINEAR = (
    *((32, 32, 32), (64, 128, 128), (512, 256, 256), (520, 256, 1024)),
    *((512, 1024, 256), (512, 768, 3072), (2048, 768, 768), (512, 768, 30522)),
)
_ATTENTION = (
    *((2, 2, 8, 16), (8, 4, 16, 32), (8, 4, 65, 64), (4, 4, 128, 64)),
    *((2, 12, 256, 64), (8, 8, 256, 64), (2, 8, 1024, 64), (1, 4, 4096, 64)),
)
_STACKED = (
    (4, 8, 8),
    (16, 16, 32),
    (32, 65, 64),
    (16, 128, 64),
    (48, 128, 64),
    (24, 256, 64),
    (64, 256, 64),
    (8, 1024, 64),
)
_RECURRENT = (
    *((5, 2, 8), (20, 8, 32), (20, 40, 64), (35, 20, 128)),
    *((50, 32, 128), (50, 64, 256), (100, 32, 256), (128, 32, 512)),
)
_LOSSES = (
    *((8, 16, 10), (64, 64, 100), (256, 128, 1000), (512, 256, 8000)),
    *((700, 200, 28782), (512, 768, 30522), (512, 768, 50257), (2048, 512, 8000)),
)
_TABLES = (
    *((10, 8, 4), (100, 32, 64), (1000, 64, 128), (8000, 256, 512)),
    *((28782, 200, 700), (50257, 768, 512), (30522, 768, 4096), (512, 768, 512)),
)
CASES = {
    "linear": Case(linear, _LINEAR),
    "bmm": Case(stacked, _STACKED),
    "cast": Case(cast, _MATRICES),
    "dropout": Case(dropout, _MATRICES),
    "embedding_gradient": Case(embedding, _TABLES),
    "attention, dropout": Case(attention_with_dropout, _ATTENTION),
    "causal attention, dropout": Case(causal_attention_with_dropout, _ATTENTION),
    "linear_cross_entropy": Case(linear_cross_entropy, _LOSSES),
    "lstm": Case(lstm, _RECURRENT),
    "gru": Case(gru, _RECURRENT),
    "rnn": Case(plain_recurrent, _RECURRENT),
}


if __name__ == "__main__":
    main()
