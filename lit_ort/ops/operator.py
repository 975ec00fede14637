"""What an operator is to the rest of lit_ort: a torch operator, and a kernel that computes it into given memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lit_ort._compat.devices import CPU
from lit_ort._compat.torch_ops import OpOverload

NAMESPACE = "lit_ort"


class Memory(Protocol):
    """Where a kernel's results and its workspace come from."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised contiguous tensor."""
        ...


class TorchMemory:
    """torch's own allocator: the memory of operators that run in eager."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Operator:
    """A torch operator with a kernel of ours.

    Args:
        target: `torch.ops.lit_ort.<name>.default`, or an aten overload.
        kernel: `kernel(memory, *args, **kwargs)` with the arguments of the target's schema; results like the target's,
            large ones in memory of `memory`.
        workspace_bytes: what it takes beside its results while it runs, from its arguments, which may be fake.
        recomputable: whether it is cheap and pure enough to be computed again in the backward.
        writes_into: position of the argument whose memory the first result is, or None.
        supports: whether the kernel computes this call, from its actual arguments; None where it computes all.
    """

    target: OpOverload
    kernel: Callable[..., Any]
    workspace_bytes: Callable[..., int] | None = None
    recomputable: bool = True
    writes_into: int | None = None
    supports: Callable[..., bool] | None = None


def cast(memory: Memory, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in another type; itself where it has it."""
    return tensor if tensor.dtype == dtype else memory.empty(*tensor.shape, dtype=dtype).copy_(tensor)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over values of `dtype` are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    eager: Callable[..., Any] | None = None,
) -> OpOverload:
    """Defines a functional operator of ours for the CPU.

    Args:
        schema: such as `dropout(Tensor x, float p) -> Tensor`.
        kernel: computes it, from a memory and its arguments.
        fake: its results' shapes, dtypes and strides, from its arguments.
        eager: what computes it in eager; by default the kernel with torch's own memory.
    """
    name, _, signature = schema.partition("(")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, f"({signature}")
    torch.library.impl(qualified, CPU.type, eager or functools.partial(kernel, TorchMemory()))
    torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.lit_ort, name).default
