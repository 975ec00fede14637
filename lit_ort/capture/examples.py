"""Fake tensors for tracing a graph: the dtypes and strides of one call's inputs, with fixed or symbolic sizes."""

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
    """The fake tensors that a graph is traced with.

    Args:
        mode: the fake mode of the tensors; its shape environment has the symbols of changing sizes.
        tensors: one for each tensor input.
        changing: the dimensions of each tensor whose sizes were symbolic when tracing began.
    """

    mode: FakeTensorMode
    tensors: tuple[FakeTensor, ...]
    changing: Dimensions


def examples_of(tensors: Sequence[torch.Tensor], differentiable: bool, dimensions: Dimensions | None) -> Examples:
    """Return fake tensors with the metadata of a call's inputs.

    Args:
        tensors: the inputs of the call.
        differentiable: whether gradients are enabled.
        dimensions: the dimensions that change; None if every size is fixed. Only sizes of one name are taken for equal.

    Raises:
        CaptureError: an input is not strided, is on another device, or is a tensor subclass.
    """
    mode = fake_mode(symbolic=dimensions is not None)
    examples, device, known = [], device_of(tensors), dict[str, Any]()
    for position, tensor in enumerate(tensors):
        _require_plain(position, tensor, device)
        changing = {} if dimensions is None else dimensions.get(position, {})
        size, stride = tuple(tensor.shape), tensor.stride()
        if changing:
            size, stride = symbolic_sizes(mode.shape_env, tensor, f"input_{position}", changing, known)
        with mode, torch.enable_grad():
            examples.append(_example(tensor, size, stride, differentiable))
    return Examples(mode, tuple(examples), dimensions or {})


def _example(tensor: torch.Tensor, size: Any, stride: Any, differentiable: bool) -> Any:
    example = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    if not (differentiable and tensor.requires_grad):
        return example
    if tensor.is_leaf:
        return example.requires_grad_()
    if any(step == 0 and length > 1 for length, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return example.requires_grad_().view_as(example)  # an expanded tensor can't be changed in place
    # A computed tensor can be changed in place; a leaf that requires grad, or a view of it, cannot.
    return example.add_(torch.zeros((), dtype=tensor.dtype, device=tensor.device, requires_grad=True))


def _goes_with(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a graph on a device can have this input: a tensor on the same device, or a scalar on the CPU."""
    return tensor.device == device or (tensor.dim() == 0 and is_cpu(tensor.device))


def _require_plain(position: int, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.layout != torch.strided or not _goes_with(tensor, device):
        raise CaptureError(
            f"input {position} is a {tensor.layout} tensor on {tensor.device}, but the inputs of this graph must be "
            f"strided tensors on {device}",
            remedy="Convert it outside of the compiled step.",
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise CaptureError(
            f"input {position} is a {type(tensor).__name__}, but sessions accept plain tensors only",
            remedy="Convert it outside of the compiled step, or keep this module in eager PyTorch with "
            "torch.compiler.disable.",
        )
