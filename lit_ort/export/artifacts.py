"""Generates the four files for training on a device with the training build's tool, in a separate process."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import onnx

from lit_ort.errors import ExportError
from lit_ort.export.graph import dynamic_dimensions, place_in
from lit_ort.export.process import run_python
from lit_ort.options import TRAINING
from lit_ort.runtime.engines.choice import installed_kind

CHECKPOINT = "checkpoint"
TRAINING_MODEL, EVALUATION_MODEL, OPTIMIZER_MODEL = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
FILES = (TRAINING_MODEL, EVALUATION_MODEL, OPTIMIZER_MODEL, CHECKPOINT)
# torch's AdamW is mode 0 of ONNX Runtime's AdamW. The tool writes mode 1, which decays weights after the step.
_GENERATE = """
import json, sys
import onnx
from onnxruntime.training import artifacts, onnxblock
settings = json.loads(sys.argv[1])
clip = settings["gradient_clip_val"]
clip = None if clip is None else onnxblock.optim.ClipGradNorm(clip)
if settings["optimizer"] == "adamw":
    options = {name: settings[name] for name in ("betas", "eps", "weight_decay")}
    block = onnxblock.optim.AdamW(clip_grad=clip, **options)
else:
    block = onnxblock.optim.SGD(clip_grad=clip)
artifacts.generate_artifacts(
    onnx.load(settings["model"]), requires_grad=settings["trainable"], frozen_params=settings["frozen"],
    optimizer=block, artifact_directory=settings["folder"],
)
path = settings["folder"] + "/optimizer_model.onnx"
model = onnx.load(path)
# ONNX Runtime 1.19 reads IR versions up to 10; the tool writes that of the onnx package.
model.ir_version = min(model.ir_version, 10)
for node in model.graph.node:
    for attribute in node.attribute:
        if attribute.name == "adam_mode":
            attribute.i = 0
onnx.save(model, path)
"""
# Optional outputs of operators that their gradients need.
_STATISTICS = {
    "Dropout": ("mask",),
    "LayerNormalization": ("mean", "inverse_deviation"),
    "SoftmaxCrossEntropyLoss": ("log_probabilities",),
}
_FIXED_SIZE_GRADIENTS = ("AveragePool", "MaxPool")
_NO_GRADIENT = re.compile(r"gradient builder has not been registered: (\S+) for node (\S+)")


def require_training_build() -> None:
    """Raises ExportError unless the training build of ONNX Runtime is installed."""
    if installed_kind() != TRAINING:
        raise ExportError(
            "Training on a device needs the training build of ONNX Runtime, but stock onnxruntime is installed. In an "
            "environment with Python 3.10 to 3.12: pip install onnxruntime-training-cpu==1.19.2."
        )


def operator_with_fixed_sizes(model: onnx.ModelProto) -> str | None:
    """An operator of a model with dynamic sizes whose gradient ONNX Runtime supports for fixed sizes only, or None.

    The gradient's kernel reads the result's shape from the model and, if a size is dynamic, writes beyond its memory.
    """
    if not any(dynamic_dimensions(model).values()):
        return None
    return next((node.op_type for node in model.graph.node if node.op_type in _FIXED_SIZE_GRADIENTS), None)


def generate(
    model: onnx.ModelProto,
    folder: Path,
    trainable: Sequence[str],
    frozen: Sequence[str],
    optimizer: str,
    settings: dict[str, object],
) -> None:
    """Writes the four files.

    Args:
        model: a model with the loss as its first output and parameters as initializers.
        folder: the folder of the files.
        trainable, frozen: the names of trainable and frozen parameters.
        optimizer: `adamw` or `sgd`.
        settings: betas, eps, weight_decay and gradient_clip_val.

    Raises:
        ExportError: an operator has no gradient, or the tool fails.
    """
    base = folder / "base.onnx"
    onnx.save_model(_with_statistics(model), base)
    arguments = {"model": str(base), "folder": str(folder), "trainable": list(trainable), "frozen": list(frozen)}
    try:
        run_python(
            _GENERATE,
            json.dumps({**arguments, "optimizer": optimizer, **settings}),
            problem="ONNX Runtime can't generate training files for the model",
            remedy="Freeze the layers before this operator with trainable=, or use other operators.",
        )
    except ExportError as error:
        missing = _NO_GRADIENT.search(str(error))
        if missing is None:
            raise
        operator, node = missing[1], missing[2].rstrip(".")
        raise ExportError(
            f"ONNX Runtime has no gradient for {operator}{_place_of(model, node)}. Use other operators, or freeze the "
            "parameters before it with trainable=."
        ) from error
    base.unlink()


def _with_statistics(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose operators have all outputs that their gradients need."""
    copied = onnx.ModelProto.FromString(model.SerializeToString())
    for node in copied.graph.node:
        missing = _STATISTICS.get(node.op_type, ())[len(node.output) - 1 :]
        node.output.extend(f"{node.output[0]}_{name}" for name in missing)
    return copied


def _place_of(model: onnx.ModelProto, name: str) -> str:
    """The location of a node in the user's code, from the stack trace that torch's exporter stored."""
    metadata = {item.key: item.value for node in model.graph.node if node.name == name for item in node.metadata_props}
    return place_in(metadata.get("pkg.torch.onnx.stack_trace", ""))
