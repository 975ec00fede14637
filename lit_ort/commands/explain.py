"""Runs a training step of your own once and says what ran where, and why not.

lit-ort explain my_package.my_module:make --details

`make` takes no arguments and returns a module and a batch, as `lit_ort.benchmark` takes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.inspect import explain
from lit_ort.benchmark.result import ORT
from lit_ort.benchmark.steps import Runner, Workload
from lit_ort.commands.target import add_target, made
from lit_ort.errors import LitOrtError
from lit_ort.options import BF16_MIXED, FLOAT32, ORTOptions


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lit-ort explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target(parser)
    parser.add_argument("--details", action="store_true", help="every graph's inputs, memory, operators and passes")
    parser.add_argument("--precision", default=FLOAT32, choices=(FLOAT32, BF16_MIXED))
    given = parser.parse_args(arguments)
    try:
        module, batch = made(given.target)
        backend = ORTBackend(ORTOptions(precision=given.precision))
        Runner(ORT, Workload(module, batch), given.precision == BF16_MIXED, backend).step()
    except LitOrtError as error:
        parser.error(str(error))
    explanation = explain(backend)
    print(explanation.details() if given.details else explanation)
