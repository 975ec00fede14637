"""The marker at which a gradient ends: `detach`, `no_grad` and the like, on their way to the gradient builder."""

from __future__ import annotations

import torch
import torch.onnx.ops

from lit_ort.runtime.aten import DOMAIN

STOP_GRADIENT = "lit_ort::stop_gradient"


def stop_gradient(value: torch.Tensor) -> torch.Tensor:
    """The same values, as an ONNX node of its own kind: only ATen nodes can be told to the builder as ends."""
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::ATen",
        (value,),
        {"operator": STOP_GRADIENT, "overload_name": ""},
        dtype=value.dtype,
        shape=value.shape,
        version=1,
    )
