"""The description of an operator for the rest of lit_ort: a torch operator and a kernel that uses given memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lit_ort._compat.devices import CPU
from lit_ort._compat.torch_ops import OpOverload

NAMESPACE = "lit_ort"


class Allocator(Protocol):
    """Allocates the results and the workspace of a kernel."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialized contiguous tensor."""
        ...


class TorchAllocator:
    """Torch's allocator, for operators that run in eager."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Operator:
    """A torch operator with a kernel of lit_ort's.

    Args:
        target: `torch.ops.lit_ort.<name>.default`, or an aten overload.
        kernel: called as `kernel(allocator, *args, **kwargs)` with the arguments of the target's schema. Returns the
            same results as the target; large ones are allocated from `allocator`.
        workspace_bytes: returns the memory that the kernel needs besides its results, from its arguments, which can be
            fake tensors.
        recomputable: whether the operator is cheap and pure enough to be recomputed in the backward.
        writes_into: the position of the argument whose memory the first result uses, or None.
        supports: returns whether the kernel supports a call, from its actual arguments; None if it supports all calls.
    """

    target: OpOverload
    kernel: Callable[..., Any]
    workspace_bytes: Callable[..., int] | None = None
    recomputable: bool = True
    writes_into: int | None = None
    supports: Callable[..., bool] | None = None


def cast(allocator: Allocator, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor to a dtype; the tensor itself if it already has this dtype."""
    return tensor if tensor.dtype == dtype else allocator.empty(*tensor.shape, dtype=dtype).copy_(tensor)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    eager: Callable[..., Any] | None = None,
) -> OpOverload:
    """Defines a functional lit_ort operator for the CPU.

    Args:
        schema: the schema, such as `dropout(Tensor x, float p) -> Tensor`.
        kernel: computes the results from a memory and the arguments.
        fake: returns results with the correct shapes, dtypes and strides from the arguments.
        eager: the implementation in eager; by default, the kernel with torch's allocator.
    """
    name, _, signature = schema.partition("(")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, f"({signature}")
    torch.library.impl(qualified, CPU.type, eager or functools.partial(kernel, TorchAllocator()))
    torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.lit_ort, name).default
