"""`lit_ort.load_training_checkpoint`: loads parameters that were trained on a device into the module."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lit_ort.errors import ExportError
from lit_ort.export.process import run_python

_READ = """
import sys
import numpy
from onnxruntime.training.api import CheckpointState
state = CheckpointState.load_checkpoint(sys.argv[1])
numpy.savez(sys.argv[2], **{name: parameter.data for name, parameter in state.parameters})
"""


def load_training_checkpoint(module: nn.Module, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Loads the parameters of a checkpoint of `onnxruntime.training.api` into the exported module.

    Args:
        module: a module with parameters of the same names and shapes. Either all of them change or, after an error,
            none.
        path: the path of the checkpoint.

    Returns:
        The names of the parameters in the file.

    Raises:
        ExportError: the file doesn't exist, is not a checkpoint, or belongs to another module.
    """
    from lit_ort.export.artifacts import require_training_build

    require_training_build()
    if not Path(path).is_file():
        raise ExportError(f"{path} does not exist. Pass the checkpoint that the device saved.")
    with tempfile.TemporaryDirectory() as folder:
        arrays_path = Path(folder, "parameters.npz")
        run_python(
            _READ,
            *(str(path), str(arrays_path)),
            problem=f"{path} is not a checkpoint that ONNX Runtime can read",
            remedy="Pass a file that CheckpointState.save_checkpoint wrote.",
        )
        with np.load(arrays_path) as arrays:
            values = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    parameters = dict(module.named_parameters())
    for name in (*values, *parameters):
        if name not in values or name not in parameters:
            raise ExportError(
                f"{path} has {'no' if name not in values else 'a'} parameter {name!r}, but {type(module).__name__} "
                f"has {'none' if name not in parameters else 'one'}. Pass the checkpoint of this module."
            )
        if values[name].shape != parameters[name].shape:
            raise ExportError(
                f"{path} has {name!r} of shape {list(values[name].shape)}, but in {type(module).__name__} its shape is "
                f"{list(parameters[name].shape)}. Pass the checkpoint of this module."
            )
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    return tuple(values)
