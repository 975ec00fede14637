"""Exports your own module's training step for any onnxruntime, and compares several steps with eager PyTorch.

lit-ort export-training my_package.my_module:make my_step

`make` has no arguments and returns a module and a batch of its training step.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_ort.commands.target import module_and_batch, one_line_errors, parser_for
from lit_ort.export.training_export import ADAMW, export_training


def main(arguments: Sequence[str]) -> None:
    parser = parser_for("export-training", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="the folder to create")
    parser.add_argument("--optimizer", default=ADAMW, help="adamw, adam or sgd")
    parser.add_argument("--trainable", nargs="+", metavar="PATTERN", help="parameters to train, such as '*.lora_*'")
    parser.add_argument("--clip-norm", type=float, help="the largest norm of all gradients together")
    parser.add_argument("--fixed", action="store_true", help="use the sizes of the batch instead of dynamic sizes")
    parser.add_argument("--no-dropout", action="store_true", help="leave dropout out")
    args = parser.parse_args(arguments)
    with one_line_errors(parser):
        module, batch = module_and_batch(args.target)
        exported = export_training(
            module,
            args.folder,
            batch,
            optimizer=args.optimizer,
            trainable=args.trainable,
            clip_norm=args.clip_norm,
            dynamic=not args.fixed,
            dropout=not args.no_dropout,
        )
    print(exported)
