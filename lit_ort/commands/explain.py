"""Runs your own training step once, and shows what ran in ONNX Runtime, what did not, and why.

lit-ort explain my_package.my_module:make --details

`make` has no arguments and returns a module and a batch for `lit_ort.benchmark`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.explanation import explain
from lit_ort.benchmark.result import ORT
from lit_ort.benchmark.training_step import Runner, Workload
from lit_ort.commands.target import module_and_batch, one_line_errors, parser_for
from lit_ort.options import BF16_MIXED, FLOAT32, ORTOptions


def main(arguments: Sequence[str]) -> None:
    parser = parser_for("explain", __doc__)
    parser.add_argument(
        "--details", action="store_true", help="with every graph's inputs, memory, operators and passes"
    )
    parser.add_argument("--precision", default=FLOAT32, choices=(FLOAT32, BF16_MIXED))
    args = parser.parse_args(arguments)
    with one_line_errors(parser):
        module, batch = module_and_batch(args.target)
        backend = ORTBackend(ORTOptions(precision=args.precision))
        Runner(ORT, Workload(module, batch), args.precision == BF16_MIXED, backend).step()
    explanation = explain(backend)
    print(explanation.details() if args.details else explanation)
