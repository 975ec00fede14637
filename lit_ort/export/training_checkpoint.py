"""`lit_ort.load_training_checkpoint`: loads parameters that were trained elsewhere into the module."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from lit_ort.errors import ExportError


def load_training_checkpoint(module: nn.Module, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Loads the parameters and buffers of a folder of `export_training` into the exported module.

    Args:
        module: a module with parameters of the same names and shapes. Either all of those in the file change or,
            after an error, none.
        path: the folder, or a file such as its parameters.safetensors.

    Returns:
        The names of the parameters and buffers in the file.

    Raises:
        ExportError: the file doesn't exist, is not in the format, or belongs to another module.
    """
    from lit_ort.export.safetensors_file import read_tensors
    from lit_ort.export.training_files import PARAMETERS

    file = Path(path, PARAMETERS) if Path(path).is_dir() else Path(path)
    values = read_tensors(file)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in values.items():
        if name not in own:
            raise ExportError(
                f"{file} has {name!r}, but {type(module).__name__} has no parameter or buffer of this name. Pass the "
                "file of this module."
            )
        if value.shape != own[name].shape:
            raise ExportError(
                f"{file} has {name!r} of shape {list(value.shape)}, but in {type(module).__name__} its shape is "
                f"{list(own[name].shape)}. Pass the file of this module."
            )
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
    return tuple(values)
