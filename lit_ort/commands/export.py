"""Writes a module of your own as an ONNX file, compared with the module.

lit-ort export my_package.my_module:make model.onnx

`make` takes no arguments and returns a module and a batch, as `lit_ort.export` takes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lit_ort.commands.target import add_target, made
from lit_ort.errors import LitOrtError
from lit_ort.export.call import FORWARD, STEPS
from lit_ort.export.export import BFLOAT16, FLOAT16, INT8, OPSET, export


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lit-ort export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target(parser)
    parser.add_argument("path", metavar="FILE", help="the file to write")
    parser.add_argument("--step", default=FORWARD, choices=STEPS)
    parser.add_argument("--fixed", action="store_true", help="keep the batch's sizes instead of letting them change")
    parser.add_argument("--opset", type=int, default=OPSET)
    parser.add_argument("--half", choices=(FLOAT16, BFLOAT16), help="keep weights in 16 bits")
    parser.add_argument("--quantize", choices=(INT8,), help="compute products with weights in 8 bits")
    parser.add_argument("--tolerance", type=float, help="the largest relative error to accept")
    given = parser.parse_args(arguments)
    try:
        module, batch = made(given.target)
        exported = export(
            module,
            given.path,
            batch,
            step=given.step,
            dynamic=not given.fixed,
            opset=given.opset,
            half=given.half,
            quantize=given.quantize,
            tolerance=given.tolerance,
        )
    except LitOrtError as error:
        parser.error(str(error))
    print(exported)
