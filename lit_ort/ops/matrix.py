"""Kernels for torch's matmuls into given memory. Factors can be transposed views, which are not copied."""

from __future__ import annotations

import torch

from lit_ort.ops.matmul import matmul, workspace_bytes
from lit_ort.ops.operator import Allocator, Operator

aten = torch.ops.aten


def mm(allocator: Allocator, self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """self @ mat2. self: [M, K], mat2: [K, N]. Returns [M, N], contiguous."""
    return matmul(self, mat2, allocator.empty(len(self), mat2.shape[1], dtype=self.dtype))


def addmm(
    allocator: Allocator,
    self: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """beta * self + alpha * mat1 @ mat2. mat1: [M, K], mat2: [K, N]; self is broadcast to [M, N]."""
    out = allocator.empty(len(mat1), mat2.shape[1], dtype=mat1.dtype)
    if beta == 1 and alpha == 1:
        return matmul(mat1, mat2, out, self)
    return torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha, out=out)


def bmm(allocator: Allocator, self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """self @ mat2 for batches of matrices. self: [B, M, K], mat2: [B, K, N]. Returns [B, M, N]."""
    return torch.bmm(self, mat2, out=allocator.empty(*self.shape[:2], mat2.shape[2], dtype=self.dtype))


def baddbmm(
    allocator: Allocator,
    self: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """beta * self + alpha * batch1 @ batch2. batch1: [B, M, K], batch2: [B, K, N]; self is broadcast to [B, M, N]."""
    out = allocator.empty(*batch1.shape[:2], batch2.shape[2], dtype=batch1.dtype)
    return torch.baddbmm(self, batch1, batch2, beta=beta, alpha=alpha, out=out)


def _addmm_bytes(self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **_: float) -> int:
    return workspace_bytes(mat1, mat2)


OPERATORS = (
    Operator(aten.mm.default, mm, workspace_bytes=workspace_bytes, recomputable=False),
    Operator(aten.addmm.default, addmm, workspace_bytes=_addmm_bytes, recomputable=False),
    Operator(aten.bmm.default, bmm, recomputable=False),
    Operator(aten.baddbmm.default, baddbmm, recomputable=False),
)
