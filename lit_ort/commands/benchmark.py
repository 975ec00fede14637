"""Measures your own training step in eager, inductor and ONNX Runtime.

lit-ort benchmark my_package.my_module:make --rounds 20

`make` has no arguments and returns a module and a batch for `lit_ort.benchmark`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from lit_ort.benchmark.result import BASELINES
from lit_ort.benchmark.run import benchmark
from lit_ort.commands.target import module_and_batch, one_line_errors, parser_for
from lit_ort.errors import OptionsError
from lit_ort.files import whole_file
from lit_ort.options import BF16_MIXED, FLOAT32, ORTOptions


def main(arguments: Sequence[str]) -> None:
    parser = parser_for("benchmark", __doc__)
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each baseline")
    parser.add_argument("--baselines", nargs="+", default=list(BASELINES), choices=BASELINES)
    parser.add_argument("--precision", default=FLOAT32, choices=(FLOAT32, BF16_MIXED))
    parser.add_argument("--clip", type=float, help="the maximum norm of the gradients")
    parser.add_argument("--json", type=Path, help="a file for all measurements")
    args = parser.parse_args(arguments)
    with one_line_errors(parser):
        if args.json is not None:
            _require_writable(args.json)
        module, batch = module_and_batch(args.target)
        options = ORTOptions(precision=args.precision)
        result = benchmark(module, batch, rounds=args.rounds, baselines=args.baselines, options=options, clip=args.clip)
    print(result)
    if args.json is not None:
        _write(args.json, json.dumps(result.as_dict(), allow_nan=False) + "\n")


def _write(path: Path, text: str) -> None:
    # A pipe or a device, such as /dev/stdout, can't be replaced.
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    with whole_file(path) as file:
        file.write(text.encode())


def _require_writable(path: Path) -> None:
    """Raises OptionsError, before anything is measured, if a file can't be written."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return
    folder = path.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK) and not path.is_dir()
    except OSError:
        is_writable = False
    if not is_writable:
        raise OptionsError(f"--json={path}: can't be written. Choose a file in a folder that can be written to.")
