"""Exports your own module as an ONNX file, and compares the file's results with the module's.

lit-ort export my_package.my_module:make model.onnx

`make` has no arguments and returns a module and a batch for `lit_ort.export`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_ort.commands.target import module_and_batch, one_line_errors, parser_for
from lit_ort.export.call import FORWARD, STEPS
from lit_ort.export.form_names import BFLOAT16, FLOAT16, INT8
from lit_ort.export.module_export import OPSET, export


def main(arguments: Sequence[str]) -> None:
    parser = parser_for("export", __doc__)
    parser.add_argument("path", metavar="FILE", help="the file to write")
    parser.add_argument("--step", default=FORWARD, choices=STEPS)
    parser.add_argument("--fixed", action="store_true", help="use the sizes of the batch instead of dynamic sizes")
    parser.add_argument("--opset", type=int, default=OPSET)
    parser.add_argument("--half", choices=(FLOAT16, BFLOAT16), help="store weights in 16 bits")
    parser.add_argument("--quantize", choices=(INT8,), help="compute matmuls with weights in 8 bits")
    parser.add_argument("--tolerance", type=float, help="the largest relative error to accept")
    args = parser.parse_args(arguments)
    with one_line_errors(parser):
        module, batch = module_and_batch(args.target)
        exported = export(
            module,
            args.path,
            batch,
            step=args.step,
            dynamic=not args.fixed,
            opset=args.opset,
            half=args.half,
            quantize=args.quantize,
            tolerance=args.tolerance,
        )
    print(exported)
