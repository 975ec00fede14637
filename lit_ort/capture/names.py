"""Readable names of a graph's inputs."""

from __future__ import annotations

import re

from torch import fx

from lit_ort._compat.torch_fx import inputs_of


def readable_name(placeholder: str) -> str:
    """Shorten Dynamo's name of an input to the name that the module uses.

    `L_self_modules_encoder_modules_layers_modules_0_parameters_weight_` -> `encoder.layers.0.weight`.
    """
    match = re.fullmatch(r"[LGlg]_\w*?_?(?P<path>(?:modules|parameters|buffers)_\w+?)_*", placeholder)
    if not match:
        return re.sub(r"^[LGlg]_|_+$", "", placeholder) or placeholder
    return re.sub(r"(?:^|_)(?:modules|parameters|buffers)_", ".", match["path"]).lstrip(".")


def input_names(module: fx.GraphModule, count: int) -> tuple[str, ...]:
    """Return unique, readable names for the first `count` inputs of a graph."""
    names: list[str] = []
    for position, node in enumerate(inputs_of(module.graph)):
        if position < count:
            name = readable_name(str(node.target))
            names.append(name if name not in names else f"{name}__{position}")
    return tuple(names)
