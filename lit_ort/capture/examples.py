"""Fake tensors to trace a graph with: the types and strides of one call's inputs, sizes fixed or symbolic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from lit_ort._compat.devices import device_of, is_cpu
from lit_ort._compat.torch_fx import FakeTensor, FakeTensorMode, fake_mode
from lit_ort._compat.torch_sizes import symbolic_sizes
from lit_ort.capture.dimensions import Dimensions
from lit_ort.errors import CaptureError


@dataclasses.dataclass(frozen=True)
class Examples:
    """What stands for the inputs of a graph while it is traced.

    Args:
        mode: the fake mode of the tensors; its shape environment knows of the sizes that change.
        tensors: one for each tensor input.
        changing: for each of them, which sizes were symbolic when tracing began.
    """

    mode: FakeTensorMode
    tensors: tuple[FakeTensor, ...]
    changing: Dimensions


def examples_of(tensors: Sequence[torch.Tensor], differentiable: bool, dimensions: Dimensions | None) -> Examples:
    """Fake tensors like a call's.

    Args:
        differentiable: whether gradients are on.
        dimensions: which sizes change; None where none does.

    Raises:
        CaptureError: a tensor that is sparse, on another device, or of a class of its own.
    """
    mode = fake_mode(symbolic=dimensions is not None)
    made, device = [], device_of(tensors)
    for position, tensor in enumerate(tensors):
        _require_plain(position, tensor, device)
        changing = () if dimensions is None else dimensions.get(position, ())
        size, stride = tuple(tensor.shape), tensor.stride()
        if changing:
            size, stride = symbolic_sizes(mode.shape_env, tensor, f"input_{position}", changing)
        with mode, torch.enable_grad():
            made.append(_example(tensor, size, stride, differentiable))
    return Examples(mode, tuple(made), dimensions or {})


def _example(tensor: torch.Tensor, size: Any, stride: Any, differentiable: bool) -> Any:
    example = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    if not (differentiable and tensor.requires_grad):
        return example
    example.requires_grad_()
    if tensor.is_leaf:
        return example
    # What is computed may be changed in place, and a parameter or a view of it may not.
    computed = example.clone()
    return computed if computed.stride() == example.stride() else example.view_as(example)


def _goes_with(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a graph on a device may take a tensor: one there, or a scalar of the CPU's."""
    return tensor.device == device or (tensor.dim() == 0 and is_cpu(tensor.device))


def _require_plain(position: int, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.layout != torch.strided or not _goes_with(tensor, device):
        raise CaptureError(
            f"input {position} is a {tensor.layout} tensor on {tensor.device}, and the sessions of this graph take "
            f"strided ones on {device}",
            remedy="Convert it outside of the compiled step.",
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise CaptureError(
            f"input {position} is a {type(tensor).__name__}, and sessions take plain tensors",
            remedy="Convert it outside of the compiled step, or leave this module to eager with "
            "torch.compiler.disable.",
        )
