"""Matmuls of bfloat16 factors whose results are float32, in machine code: what reads a result rounds it, if at all."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import register_flop_formula

from lit_ort._compat import openmp
from lit_ort._compat.torch_blas import has_matrix_tiles, is_x86
from lit_ort.errors import KernelError
from lit_ort.ops.operator import Allocator, Operator, define

if TYPE_CHECKING:
    from lit_ort.kernels.matmul_calls import MatmulCode


def has_bfloat16_matmuls() -> bool:
    """Whether sessions compute matmuls of bfloat16 factors in machine code.

    oneDNN has faster matmuls for CPUs with AMX, and for those that are not x86.
    """
    return openmp.uses_openmp() and not has_matrix_tiles() and is_x86() and bfloat16_matmuls() is not None


@functools.cache
def bfloat16_matmuls() -> MatmulCode | None:
    """The machine code of this process; None if there is none for this CPU, or llvmlite is not installed."""
    try:
        from lit_ort.kernels.machine_code import host_cpu  # loads LLVM
        from lit_ort.kernels.matmul_calls import MatmulCode
        from lit_ort.kernels.matmul_library import matmul_library
        from lit_ort.kernels.thread_pool import Runner

        cpu = host_cpu()
    except (ImportError, KernelError):
        return None
    runner = Runner(cpu, openmp.find_openmp())
    return MatmulCode(matmul_library(cpu, runner), cpu, runner)


def bfloat16_matmul(allocator: Allocator, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, with sums in float32.

    Args:
        allocator: allocates the result, float32[rows, columns] or float32[batch, rows, columns].
        left: bfloat16[rows, inner] or bfloat16[batch, rows, inner].
        right: bfloat16[inner, columns] or bfloat16[batch, inner, columns].
    """
    from lit_ort.kernels.matmul_calls import Matmul, MatmulArguments  # loads LLVM

    code = bfloat16_matmuls()
    assert code is not None, "the pass that makes this operator checks it"
    result = allocator.empty(*_shape(left, right), dtype=torch.float32)
    forms = tuple(factor.mT.is_contiguous() and not factor.is_contiguous() for factor in (left, right))
    factors = [f.mT if is_transposed else f.contiguous() for f, is_transposed in zip((left, right), forms, strict=True)]
    (rows, columns), inner = result.shape[-2:], left.shape[-1]
    matmul = Matmul(left.dtype, math.prod(result.shape[:-2]), rows, columns, inner, (forms[0], forms[1]))
    arguments = MatmulArguments(code, matmul)
    words = (ctypes.c_int64 * 3).from_address(arguments.tensors)
    words[:] = [tensor.data_ptr() for tensor in (*factors, result)]
    code.runner.run(arguments.address)
    return result


def _shape(left: torch.Tensor, right: torch.Tensor) -> list[Any]:
    return [*left.shape[:-1], right.shape[-1]]


def _fake(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_empty(_shape(left, right), dtype=torch.float32)


_SCHEMA = "bfloat16_matmul(Tensor left, Tensor right) -> Tensor"
OPERATORS = (Operator(define(_SCHEMA, bfloat16_matmul, _fake), bfloat16_matmul, recomputable=False),)


@register_flop_formula(torch.ops.lit_ort.bfloat16_matmul)
def _operations(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """The FLOP of a matmul, from shapes."""
    return 2 * math.prod(left) * right[-1]
