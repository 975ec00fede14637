"""The folder of an exported training step."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import torch

from lit_ort.errors import ExportError
from lit_ort.export.safetensors_file import write_tensors
from lit_ort.export.step_function import NEXT, RATE, SEED, Step
from lit_ort.export.step_optimizers import Optimizer, Tensors
from lit_ort.export.write import EXTERNAL_BYTES, sizes_of
from lit_ort.files import open_to_others
from lit_ort.version import __version__

TRAIN, EVALUATE, PREDICT = "train_step.onnx", "eval_step.onnx", "predict.onnx"
PARAMETERS, OPTIMIZER, BATCH = "parameters.safetensors", "optimizer.safetensors", "batch.safetensors"
LOOPS = ("train.py", "train.mjs", "train.html")


class Models(NamedTuple):
    """The three models, and the state that the first one changes."""

    train: onnx.ModelProto
    evaluate: onnx.ModelProto
    predict: onnx.ModelProto
    state: Tensors


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside another one that becomes that folder at the end; after an error, none is left.

    Raises:
        ExportError: the folder exists, or can't be written.
    """
    if target.exists():
        raise ExportError(f"{target} exists. Choose a folder that doesn't exist, or remove it.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise ExportError(f"{target} can't be written: {error.strerror}. Choose another folder.") from error
    try:
        yield temporary
        open_to_others(temporary)
        os.rename(temporary, target)
    except OSError as error:
        raise ExportError(f"{target} can't be written: {error.strerror}. Choose another folder.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_files(
    folder: Path,
    models: Models,
    step: Step,
    optimizer: Optimizer,
    optimizer_name: str,
    clip_norm: float | None,
    fixed_sizes: Sequence[str],
) -> None:
    """Writes models, state, an example batch, the description and the loops."""
    for name, model in ((TRAIN, models.train), (EVALUATE, models.evaluate), (PREDICT, models.predict)):
        if model.graph.output:
            _require_size(model, name)
            onnx.save_model(model, folder / name)
    parameters = {name for name in models.state if name in step.state_names}
    write_tensors(folder / PARAMETERS, {k: v for k, v in models.state.items() if k in parameters})
    write_tensors(folder / OPTIMIZER, {k: v for k, v in models.state.items() if k not in parameters})
    write_tensors(folder / BATCH, dict(zip(step.names, step.batch, strict=True)))
    description = _description(models, step, optimizer, optimizer_name, clip_norm)
    (folder / "train_step.json").write_text(json.dumps(description, indent=1))
    loops = files("lit_ort.export") / "loops"
    for name in LOOPS:
        (folder / name).write_text((loops / name).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "README.md").write_text(_readme(description, fixed_sizes), encoding="utf-8")


def _require_size(model: onnx.ModelProto, name: str) -> None:
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if size > EXTERNAL_BYTES:
        raise ExportError(
            f"{name} would have {size / 2**30:.1f} GiB of frozen parameters, but a file has at most 2. Freeze fewer "
            "parameters with trainable=, or export a smaller module."
        )


def _description(
    models: Models, step: Step, optimizer: Optimizer, optimizer_name: str, clip_norm: float | None
) -> dict[str, Any]:
    module = type(step.module)
    return {
        "format": 1,
        "lit_ort": __version__,
        "torch": torch.__version__,
        "class": f"{module.__module__}.{module.__qualname__}",
        "optimizer": {"name": optimizer_name, **optimizer.settings, "clip_norm": clip_norm},
        "train_step": _of_model(models.train, step),
        "eval_step": _of_model(models.evaluate, step),
        "predict": _of_model(models.predict, step) if models.predict.graph.output else None,
        "feeds": {f"{name}{NEXT}": name for name in models.state},
    }


def _of_model(model: onnx.ModelProto, step: Step) -> dict[str, Any]:
    """Names, shapes, types and roles of a model's inputs, and the names of its outputs."""
    names = [value.name for value in model.graph.input]
    shapes = sizes_of(model, names)
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    roles = {**{name: "parameter" for name in step.state_names}, **{name: "batch" for name in step.names}}
    roles |= {RATE: RATE, SEED: SEED}
    return {
        "inputs": {
            name: {
                "shape": shapes[name],
                "dtype": onnx.helper.tensor_dtype_to_np_dtype(types[name]).name,
                "role": roles.get(name, "optimizer"),
            }
            for name in names
        },
        "outputs": [value.name for value in model.graph.output],
    }


def _readme(description: dict[str, Any], fixed_sizes: Sequence[str]) -> str:
    inputs = description["train_step"]["inputs"]
    batch = [f"`{name}`: {v['dtype']}{list(v['shape'])}" for name, v in inputs.items() if v["role"] == "batch"]
    reports = [name for name in description["train_step"]["outputs"] if not name.endswith(NEXT)]
    predict = description["predict"]
    outputs = "" if predict is None else f"; predict.onnx: {', '.join(predict['outputs'])}"
    optimizer = ", ".join(f"{key} {value}" for key, value in description["optimizer"].items() if key != "name")
    fixed = "".join(f"\n- Of one size, which the module uses as a constant: {size}." for size in fixed_sizes)
    return f"""# The training step of {description["class"]}

Written by lit_ort {description["lit_ort"]}. Everything runs in onnxruntime (1.20 or later), without torch.

- A step takes the batch ({"; ".join(batch)}), the learning rate, parameters and optimizer state, and returns
  {", ".join(reports)}, and the new parameters and state, whose names end with `{NEXT}`.
- Optimizer: {description["optimizer"]["name"]}, {optimizer}.
- eval_step.onnx: {", ".join(description["eval_step"]["outputs"])}{outputs}.
- train_step.json lists names, shapes and types, and which output feeds which input of the next step.{fixed}

```bash
pip install onnxruntime numpy && python train.py                # Python
npm install onnxruntime-node && node train.mjs                  # Node
python -m http.server                                           # a page: http://localhost:8000/train.html
```

Each takes 20 steps with the batch of the export, batch.safetensors; put your data in its place. The parameters come
back with `lit_ort.load_training_checkpoint(module, "parameters.safetensors")`.
"""
