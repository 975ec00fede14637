"""Writes docs/support.md from the support list and what the zoo's models compile to.

python -m tests.zoo.report
"""

from __future__ import annotations

import inspect
from pathlib import Path

from lit_ort.compiler import support
from lit_ort.inspect import GraphReport

PATH = Path(__file__).parents[2] / "docs" / "support.md"
_HEAD = """# What runs where

A graph takes, for each of its operators, the first of these ways that is proven to give eager's gradients:

1. ONNX Runtime's own gradient builder, for the operators of the list below;
2. a decomposition or a rewrite into such operators, or into a kernel of this project;
3. the operator as torch's own, one node of the graph, with the gradient of torch's autograd;
4. eager PyTorch for that graph, with one warning (`fallback="warn"`), or an error (`fallback="error"`).

`lit_ort.explain(trainer)` says which graphs and operators went which way. This page is written by
`python -m tests.zoo.report`, and the tests hold each of its lines.

## Operators of ONNX with a proven gradient

"""
_MODELS = """

## Models

Each is tested small, with random weights: one graph a step, loss and every gradient within 1e-4 of eager, buffers as
eager leaves them, and dropout drawn anew. Other operators than those named run by ways 1 and 2.

| model | a step runs as | operators run by torch |
|---|---|---|
"""


def operators() -> str:
    """The support list, with the condition of each entry."""
    lines = []
    for name, check in support.SUPPORTED.items():
        condition = (inspect.getdoc(check) or "").rstrip(".")
        lines.append(f"- {name}{f', {condition[0].lower()}{condition[1:]}' if condition else ''}")
    return "\n".join(lines)


def row(name: str, graphs: tuple[GraphReport, ...]) -> str:
    """A model's line."""
    kinds = ", ".join(graph.kind for graph in graphs)
    called = sorted({operator.rpartition(".")[0] for graph in graphs for operator in graph.torch_operators})
    return f"| {name} | one {kinds} graph | {', '.join(f'`{operator}`' for operator in called) or 'none'} |"


def main() -> None:
    from tests.zoo.run import compare_steps
    from tests.zoo.test_models import CASES

    rows = [row(name, compare_steps(case, steps=1).graphs) for name, case in CASES.items()]
    PATH.write_text(f"{_HEAD}{operators()}{_MODELS}{chr(10).join(rows)}\n")


if __name__ == "__main__":
    main()
