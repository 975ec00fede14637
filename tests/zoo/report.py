"""Writes docs/support.md from the lowering table and the graphs of the zoo's models.

python -m tests.zoo.report
"""

from __future__ import annotations

from pathlib import Path

from lit_ort._compat import openmp
from lit_ort.fusions import fusion_pipeline as fusions
from lit_ort.lower.native_operators import NATIVE_OPERATORS
from lit_ort.lower.operators import LOWERINGS
from lit_ort.passes import pass_pipeline as passes
from lit_ort.runtime.engines.engine_interface import IN_PLACE_OPERATOR, OPERATOR
from lit_ort.runtime.report import GraphReport
from tests.operators import known

TORCH_OPERATORS = (OPERATOR, IN_PLACE_OPERATOR)
# Of torch, with which the page is written.
RELEASE = "2.13"
PATH = Path(__file__).parents[2] / "docs" / "support.md"
_HEAD = """# What runs where

The gradients of a graph are torch's: AOTAutograd traces forward and backward into one graph of ATen operators, so every
operator that torch can differentiate is supported. A graph of matmuls in float32 or float64, recurrent layers, large
output layers with their cross entropy, views and what regions can compute is a *native* session: ONNX Runtime runs it
without a call of Python, with compiled regions, loops over time and losses over chunks as custom operators.
Its matmuls are custom operators too, MKL's on Intel's CPUs and on AMD's before Zen 4, and compiled ones on others, of
whose vectors MKL uses half. All nodes run on the threads of OpenMP that torch's operators use, so that a native session
can also call torch for operators of any size.
Where torch has no OpenMP, matmuls and threads are ONNX Runtime's, and it calls only small ones. In every other graph,
each operator runs

1. as a kernel of ONNX Runtime: the operators of the lowering table below, for the dtypes of the table, if enough of
   them follow each other to outweigh the cost of passing values between torch and ONNX Runtime;
2. in a region of machine code, together with others: pointwise operators, reductions, softmax, normalizations, gathers,
   losses, casts and copies, where that is as fast;
3. as torch's operator, or as one of lit_ort's, in a torch node: all others.

A graph runs in eager PyTorch, with one warning that states the reason (`fallback="warn"`), or raises an error
(`fallback="error"`), if it

- can't be traced: it chooses between graphs (`torch.cond`), the size of a gradient depends on values, or an input is
  not a plain dense tensor on a device of the engine (the CPU; with stock onnxruntime also CUDA);
- changes an input in place that shares memory with another input, or changes the shape of an input;
- has sparse gradients, or returns a tensor that is not a view of a contiguous result.

Gradients that are differentiated again (`create_graph=True`) are computed in eager, and so are those of a value that a
graph computes (`torch.autograd.grad(loss, hidden)`, `backward(inputs=[hidden])`): the graph runs in eager, from the
start if the call is in the compiled function, otherwise from then on. If eager can't repeat the session's run then
(random numbers, inputs changed in place), an error is raised. The same holds for hooks and `retain_grad()` on a value
from which the graph computes other results. A graph also runs in eager if the compiled function reads the `grad_fn` of
one of its values. Outside, the `grad_fn` of a result is a node of the whole graph, and hooks on it raise an error. If
a result is a view, its `grad_fn` is a node of torch's, and `register_hook` on it raises an error if the graph computes
other results from the view. If only some results of a graph without a loss are differentiated, the gradients of the
others are zeros, as with every backend of `torch.compile`, which give NaN where a derivative is infinite (`sqrt(0)`).

`lit_ort.explain(trainer)` shows where each graph and operator ran. This page is written by
`python -m tests.zoo.report`, and tests check each of its lines.

## Operators of ONNX Runtime, fusions and passes

"""
_OPERATORS = """

## Operators of torch

For every operator of torch's database of tests (`torch.testing`), results and gradients of its first two samples in
float32 are compared with eager: all are the same, and none raises an error. The following operators run in eager for
some of their samples, all others in sessions:

"""
_MODELS = """

## Models

Each model is tested at a small size with random weights: the relative errors of loss, gradients and buffers compared
with eager are at most 1e-4, and dropout masks differ at each step. A step is one graph, except for models whose code
reads values of tensors. The numbers, for torch 2.13, are those of operators of ONNX Runtime, with regions and matmuls,
and of operators of torch, in sessions on their own threads and on OpenMP's.

| model | graphs of a step | own threads: ONNX Runtime, torch | OpenMP: ONNX Runtime, torch |
|---|---|---|---|
"""


def operators() -> str:
    """The operators that can run as kernels of ONNX Runtime, and the names of fusions and passes."""
    lowered = sorted({str(target).rpartition(".")[0] for target in LOWERINGS})
    native = sorted(str(target).rpartition(".")[0] for target, one in NATIVE_OPERATORS.items() if not one.view)
    parts = {
        "Operators": lowered,
        "Matmuls of native sessions": native,
        "Fusions": fusions.names(),
        "Passes": passes.names(),
    }
    return "\n".join(f"- {title}: {', '.join(f'`{name}`' for name in names)}" for title, names in parts.items())


def row(name: str, own: str, shared: str) -> str:
    """The row of a model: its name and the cells of both kinds of threads."""
    kinds, numbers = own.split(" | ")
    return f"| {name} | {kinds} | {numbers} | {shared.split(' | ')[1]} |"


def cells(graphs: tuple[GraphReport, ...]) -> str:
    """The graphs of a model's step, and their operators by who computes them."""
    kinds = f"one {graphs[0].kind} graph" if len(graphs) == 1 else f"{len(graphs)} graphs"
    onnx_count = sum(n for graph in graphs for name, n in graph.operators_after.items() if name not in TORCH_OPERATORS)
    torch_count = sum(count for graph in graphs for count in graph.torch_operators.values())
    return f"{kinds} | {onnx_count}, {torch_count}"


def is_on_the_page(name: str, graphs: tuple[GraphReport, ...]) -> bool:
    """Whether the page has the numbers of a model's step for this CPU."""
    line = next(line for line in PATH.read_text().splitlines() if line.startswith(f"| {name} |"))
    _, _, kinds, own, shared, _ = (cell.strip() for cell in line.split("|"))
    return f"{kinds} | {shared if openmp.uses_openmp() else own}" == cells(graphs)


def main() -> None:
    import torch

    from tests.zoo.run import compare_steps
    from tests.zoo.test_models import CASES

    # As in the tests: with more threads, torch can choose other convolutions and other memory formats.
    torch.set_num_threads(1)
    rows = []
    for name, case in CASES.items():
        found = []
        for is_used in (False, True):
            openmp.uses_openmp = lambda is_used=is_used: is_used
            # Otherwise Dynamo treats the batches of different models as one batch with dynamic sizes.
            torch._dynamo.reset()
            found.append(cells(compare_steps(case, steps=1).graphs))
        rows.append(row(name, *found))
    PATH.write_text(f"{_HEAD}{operators()}{_OPERATORS}{known.page()}{_MODELS}{chr(10).join(rows)}\n")


if __name__ == "__main__":
    main()
