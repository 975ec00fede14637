"""The four files of training on a device, by the training build's own tool, in a process of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import onnx

from lit_ort.errors import ExportError
from lit_ort.export.graph import changing_of, place_in
from lit_ort.export.process import run_python
from lit_ort.options import TRAINING
from lit_ort.runtime.engines.choice import installed_kind

CHECKPOINT = "checkpoint"
TRAINING_MODEL, EVALUATION_MODEL, OPTIMIZER_MODEL = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
FILES = (TRAINING_MODEL, EVALUATION_MODEL, OPTIMIZER_MODEL, CHECKPOINT)
# torch's AdamW is mode 0 of ONNX Runtime's; its tool writes mode 1, which decays weights behind the step.
_GENERATE = """
import json, sys
import onnx
from onnxruntime.training import artifacts, onnxblock
asked = json.loads(sys.argv[1])
clip = asked["gradient_clip_val"]
clip = None if clip is None else onnxblock.optim.ClipGradNorm(clip)
if asked["optimizer"] == "adamw":
    figures = {name: asked[name] for name in ("betas", "eps", "weight_decay")}
    block = onnxblock.optim.AdamW(clip_grad=clip, **figures)
else:
    block = onnxblock.optim.SGD(clip_grad=clip)
artifacts.generate_artifacts(
    onnx.load(asked["model"]), requires_grad=asked["trainable"], frozen_params=asked["frozen"], optimizer=block,
    artifact_directory=asked["folder"],
)
path = asked["folder"] + "/optimizer_model.onnx"
model = onnx.load(path)
# The newest that ONNX Runtime 1.19 reads; the tool writes that of the onnx package.
model.ir_version = min(model.ir_version, 10)
for node in model.graph.node:
    for attribute in node.attribute:
        if attribute.name == "adam_mode":
            attribute.i = 0
onnx.save(model, path)
"""
_NEEDED = {
    "Dropout": ("mask",),
    "LayerNormalization": ("mean", "inverse_deviation"),
    "SoftmaxCrossEntropyLoss": ("log_probabilities",),
}
_SIZED = ("MaxPool",)
_NO_GRADIENT = re.compile(r"gradient builder has not been registered: (\S+) for node (\S+)")


def require_training_build() -> None:
    """Raises ExportError where ONNX Runtime is not the build that can make and run such files."""
    if installed_kind() != TRAINING:
        raise ExportError(
            "Training on a device needs the training build of ONNX Runtime, and stock onnxruntime is installed. In an "
            "environment of Python 3.10 to 3.12: pip install onnxruntime-training-cpu==1.19.2."
        )


def operator_with_fixed_sizes(model: onnx.ModelProto) -> str | None:
    """An operator of a model with changing sizes whose gradient ONNX Runtime computes for fixed ones alone.

    The kernel takes its result's shape from the model and, where a size has a name, writes beyond its memory.
    """
    if not any(changing_of(model).values()):
        return None
    return next((node.op_type for node in model.graph.node if node.op_type in _SIZED), None)


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
        model: with the loss as its first output and parameters as initializers.
        trainable, frozen: names of those.
        settings: betas, eps, weight_decay and gradient_clip_val.

    Raises:
        ExportError: an operator without a gradient, by name, or whatever else the tool refuses.
    """
    base = folder / "base.onnx"
    onnx.save_model(_with_statistics(model), base)
    asked = {"model": str(base), "folder": str(folder), "trainable": list(trainable), "frozen": list(frozen)}
    try:
        run_python(
            _GENERATE,
            json.dumps({**asked, "optimizer": optimizer, **settings}),
            problem="ONNX Runtime can't make training files of the model",
            remedy="Freeze the part before it by trainable=, or compute it by other operators.",
        )
    except ExportError as error:
        missing = _NO_GRADIENT.search(str(error))
        if missing is None:
            raise
        operator, node = missing[1], missing[2].rstrip(".")
        raise ExportError(
            f"ONNX Runtime has no gradient for {operator}{_place_of(model, node)}. Compute it by other operators, or "
            "leave the parameters before it out of trainable."
        ) from error
    base.unlink()


def _with_statistics(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose operators give all results that their gradients are computed from."""
    copied = onnx.ModelProto.FromString(model.SerializeToString())
    for node in copied.graph.node:
        missing = _NEEDED.get(node.op_type, ())[len(node.output) - 1 :]
        node.output.extend(f"{node.output[0]}_{name}" for name in missing)
    return copied


def _place_of(model: onnx.ModelProto, name: str) -> str:
    """Where a node came from in the user's code, as torch's exporter wrote it down."""
    facts = {fact.key: fact.value for node in model.graph.node if node.name == name for fact in node.metadata_props}
    return place_in(facts.get("pkg.torch.onnx.stack_trace", ""))
