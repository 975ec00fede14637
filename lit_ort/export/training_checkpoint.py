"""`lit_ort.load_training_checkpoint`: parameters that were trained on a device come back into the module."""

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
    """Puts the parameters of a checkpoint of `onnxruntime.training.api` into the module that it was exported from.

    Args:
        module: with parameters of the same names and shapes. All of them change or, after an error, none.
        path: of the file.

    Returns:
        The names of the parameters that were in the file.

    Raises:
        ExportError: no such file, no checkpoint, or one of another module.
    """
    from lit_ort.export.artifacts import require_training_build

    require_training_build()
    if not Path(path).is_file():
        raise ExportError(f"{path}: there is no such file. Give the checkpoint that the device saved.")
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder, "parameters.npz")
        run_python(
            _READ,
            *(str(path), str(taken)),
            problem=f"{path} is no checkpoint that ONNX Runtime can read",
            remedy="Give a file that CheckpointState.save_checkpoint wrote.",
        )
        with np.load(taken) as found:
            values = {name: torch.from_numpy(found[name]) for name in found.files}
    parameters = dict(module.named_parameters())
    for name in (*values, *parameters):
        if name not in values or name not in parameters:
            raise ExportError(
                f"{path} has {'no' if name not in values else 'a'} parameter {name!r}, and {type(module).__name__} "
                f"has {'none' if name not in parameters else 'one'}. Give the checkpoint of this module."
            )
        if values[name].shape != parameters[name].shape:
            raise ExportError(
                f"{path} has {name!r} of shape {list(values[name].shape)}, and in {type(module).__name__} it is of "
                f"{list(parameters[name].shape)}. Give the checkpoint of this module."
            )
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    return tuple(values)
