"""Writes docs/support.md from the lowering table and what the zoo's models compile to.

python -m tests.zoo.report
"""

from __future__ import annotations

from pathlib import Path

from lit_ort.fusions import pipeline as fusions
from lit_ort.lower.operators import LOWERINGS
from lit_ort.passes import pipeline as passes
from lit_ort.runtime.report import GraphReport
from tests.operators import known

PATH = Path(__file__).parents[2] / "docs" / "support.md"
_HEAD = """# What runs where

A graph's gradient is torch's: AOTAutograd traces forward and backward into one graph of ATen operators, so that no
operator has to be on a list. Each of them then runs in the session

1. as a kernel of ONNX Runtime's: the operators of the lowering table below, in the types that it names, where enough of
   them follow each other to pay for handing values over;
2. as torch's own operator, or one of this project's, in a torch node: everything else.

A graph runs in eager PyTorch, with one warning that gives the reason (`fallback="warn"`), or raises
(`fallback="error"`), where it

- can't be traced: it chooses between graphs (`torch.cond`), a gradient's size depends on values, an input is no plain
  dense tensor on the CPU;
- changes in place what shares memory with another input, or an input's shape;
- gives sparse gradients, or returns what is no view of a contiguous result.

A gradient that is differentiated again (`create_graph=True`) is eager's: that graph runs in eager from then on. Where
eager could not repeat the session's run (random draws, inputs changed in place), it raises.

`lit_ort.explain(trainer)` says which graphs and operators went which way. This page is written by
`python -m tests.zoo.report`, and the tests hold each of its lines.

## Operators of ONNX Runtime, and rewrites

"""
_OPERATORS = """

## torch's operators

Every operator of torch's own database (`torch.testing`), with its first five samples in float32 and float64, is
compared with eager, results and gradients: none is wrong, none raises. These run in eager with some of their samples,
all others in sessions:

"""
_MODELS = """

## Models

Each is tested small, with random weights: loss and every gradient within 1e-4 of eager, buffers as eager leaves them,
and dropout drawn again at each step. A step is one graph, but for models whose own code looks at values.

| model | a step runs as | operators of ONNX Runtime | operators of torch |
|---|---|---|---|
"""


def operators() -> str:
    """The operators that may run as ONNX Runtime's own kernels, and the names of fusions and passes."""
    lowered = sorted({str(target).rpartition(".")[0] for target in LOWERINGS})
    parts = {"Operators": lowered, "Fusions": fusions.names(), "Passes": passes.names()}
    return "\n".join(f"- {title}: {', '.join(f'`{name}`' for name in names)}" for title, names in parts.items())


def row(name: str, graphs: tuple[GraphReport, ...]) -> str:
    """A model's line."""
    runs = f"one {graphs[0].kind} graph" if len(graphs) == 1 else f"{len(graphs)} graphs"
    native = sum(count for graph in graphs for name, count in graph.operators_after.items() if name != "ATen")
    called = sum(count for graph in graphs for count in graph.torch_operators.values())
    return f"| {name} | {runs} | {native} | {called} |"


def main() -> None:
    import torch

    from tests.zoo.run import compare_steps
    from tests.zoo.test_models import CASES

    # As in the tests: with two threads torch may choose other convolutions, and with them other memory formats.
    torch.set_num_threads(1)
    rows = []
    for name, case in CASES.items():
        # Else Dynamo takes the models' batches for one batch of changing sizes.
        torch._dynamo.reset()
        rows.append(row(name, compare_steps(case, steps=1).graphs))
    PATH.write_text(f"{_HEAD}{operators()}{_OPERATORS}{known.page()}{_MODELS}{chr(10).join(rows)}\n")


if __name__ == "__main__":
    main()
